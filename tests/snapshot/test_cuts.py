#!/usr/bin/env python3
"""Truth about history: every validation trace, cut where a ring would cut it. Whatever the cut, no contradiction may
appear, reserved and allocated must be the allocator's, and owners must add up. Usage: test_cuts.py MEMFIT"""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from oracle_allocator import Allocator, Device  # noqa: E402
from replay_traces import traces  # noqa: E402
from snapshot_writer import snapshot, write  # noqa: E402
from workloads import run  # noqa: E402


def call(binary, *args):
    return json.loads(subprocess.run([binary, *args, "--json"], capture_output=True, check=True).stdout)


def main():
    binary = sys.argv[1]
    bad = cuts = exact = 0
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "cut.pickle")
        for name, (program, settings, total, on_oom) in traces().items():
            a = Allocator(Device(total), settings)
            run(program, a, on_oom)
            n = len(a.events)
            for kept in (n - 1, n * 2 // 3, n // 2, n // 5, 37):
                write(snapshot([a], settings, keep_last=kept), path)
                d = call(binary, "explain", path)["devices"][0]
                flags = ["--device-memory", f"{total}B"] if settings.memory_fraction is not None else []
                differ = call(binary, "whatif", path, *flags)["match"]["events_that_differ"]
                cuts += 1
                exact += differ == 0
                problems = []
                if d["violations"]:
                    problems.append(f"violations {d['violation_list']}")
                if d["peak_reserved_bytes"] != max(a.reserved_after[-kept - 1:]):
                    problems.append("the reserved peak is not the allocator's")
                if (d["reserved_bytes"], d["allocated_bytes"]) != (a.reserved, a.allocated):
                    problems.append("the end is not the allocator's")
                if sum(o["bytes"] for o in d["owners_at_peak"]) != d["peak_allocated_bytes"]:
                    problems.append("owners do not add up")
                # The age of cached blocks is lost with the events; only garbage collection looks at it.
                if differ and not settings.garbage_collection_threshold:
                    problems.append(f"the replay differs at {differ} events")
                if problems:
                    bad += 1
                    print("BAD ", name, kept, *problems)
    print(f"{cuts} cuts, {bad} bad; {exact} replayed exactly")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
