#!/usr/bin/env python3
"""Replay validation: memfit's replay against traces of the independent Python allocator.

Usage: test_replay.py MEMFIT [--out results.json]. Exit status 1 when an event differs anywhere.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from oracle_allocator import Allocator, Device, Settings  # noqa: E402
from replay_traces import traces  # noqa: E402
from snapshot_writer import snapshot, write  # noqa: E402
from workloads import MIB, run  # noqa: E402


def memfit(binary, *args):
    done = subprocess.run([binary, *args], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{args}: exit {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("memfit")
    parser.add_argument("--out")
    parser.add_argument("--only")
    args = parser.parse_args()
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as tmp:
        for name, (program, settings, total, on_oom) in traces().items():
            if args.only and args.only not in name:
                continue
            allocator = Allocator(Device(total), settings)
            failed = run(program, allocator, on_oom)
            path = os.path.join(tmp, name + ".pickle")
            write(snapshot([allocator], settings), path)
            extra = ["--device-memory", f"{total}B"] if settings.memory_fraction is not None else []
            got = memfit(args.memfit, "whatif", path, "--json", *extra)
            peak = max(allocator.reserved_after)
            row = {"trace": name, "events": len(allocator.events), "differ": got["match"]["events_that_differ"],
                   "reserved_peak_bytes": peak, "memfit_reserved_peak_bytes": got["recorded"]["reserved_peak_bytes"],
                   "oom": failed is not None, "memfit_oom": got["recorded"]["oom"]}
            # The other direction: predict other settings from this trace and let the oracle run them for real.
            if on_oom == "stop" and failed is None and not settings.memory_fraction:
                for label, other, flags in (
                        ("expandable", Settings(expandable_segments=True), ["--conf", "expandable_segments:True", "--max-split-size", "none", "--roundup-power2-divisions", "0"]),
                        ("split64", Settings(max_split_size=64 * MIB), ["--no-expandable-segments", "--max-split-size", "64MiB", "--roundup-power2-divisions", "0"]),
                        ("roundup4", Settings(roundup_power2_divisions=4), ["--no-expandable-segments", "--max-split-size", "none", "--roundup-power2-divisions", "4"])):
                    check = Allocator(Device(total), other)
                    run(program, check, on_oom)
                    predicted = memfit(args.memfit, "whatif", path, "--json", "--device-memory", f"{total}B", *flags)["predicted"]["reserved_peak_bytes"]
                    row[f"predicted_{label}"] = predicted
                    row[f"oracle_{label}"] = max(check.reserved_after)
            good = row["differ"] == 0 and row["reserved_peak_bytes"] == row["memfit_reserved_peak_bytes"] and row["oom"] == row["memfit_oom"]
            # Where a device puts a segment decides ties between blocks of one size, and no recording says it: 2 % of play.
            good = good and all(abs(row[k] - row["oracle_" + k[10:]]) <= 0.02 * row["oracle_" + k[10:]] for k in row if k.startswith("predicted_"))
            row["good"] = good
            bad += not good
            rows.append(row)
            print("ok  " if good else "BAD ", json.dumps({k: v for k, v in row.items() if k != "good"}), flush=True)
    print(f"{len(rows)} traces, {sum(r['events'] for r in rows)} events, {bad} bad")
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"traces": rows, "bad": bad}, f, indent=1)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
