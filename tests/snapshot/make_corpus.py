#!/usr/bin/env python3
"""Write the seeds of the reader's fuzz target: small snapshots in every form. Usage: make_corpus.py FOLDER"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from oracle_allocator import MIB, Allocator, Device, Settings  # noqa: E402
from snapshot_writer import snapshot, write  # noqa: E402
from workloads import Program, run  # noqa: E402

out = sys.argv[1]
os.makedirs(out, exist_ok=True)
for name, settings in (("plain", Settings()), ("expandable", Settings(expandable_segments=True))):
    p = Program()
    a = p.alloc(3 * MIB, p.stack("a.py:1:f", "b.py:2:g"))
    b = p.alloc(700, p.stack("a.py:3:h"), stream=7, pool=(0, 1))
    p.free(a)
    p.alloc(30 * MIB, p.stack("a.py:1:f"))
    p.alloc(90 * MIB, p.stack("a.py:9:big"))
    alloc = Allocator(Device(40 * MIB), settings)
    run(p, alloc)
    snap = snapshot([alloc], settings)
    for form in ("2", "3", "4", "5", "sparse", "json"):
        write(snap, os.path.join(out, f"{name}_{form}"), form)
    write(snap["segments"], os.path.join(out, f"{name}_list"), "4")
