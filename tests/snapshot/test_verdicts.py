#!/usr/bin/env python3
"""The verdict suite: snapshots with a known cause, what memfit explain says of them, and whether its numbers add up and
its advice holds when the independent allocator runs the same program with it.

Usage: test_verdicts.py MEMFIT [--out results.json] [--only NAME]. Exit status 1 when one case is wrong.
"""
import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from oracle_allocator import MIB, Allocator, Device, Settings  # noqa: E402
from snapshot_writer import snapshot, write  # noqa: E402
from verdict_cases import cases  # noqa: E402
from workloads import run  # noqa: E402


def settings_with(conf, base):
    s = dataclasses.replace(base)
    if "expandable_segments:True" in conf:
        s.expandable_segments = True
    if m := re.search(r"max_split_size_mb:(\d+)", conf):
        s.max_split_size = int(m.group(1)) * MIB
    if m := re.search(r"roundup_power2_divisions:(\d+)", conf):
        s.roundup_power2_divisions = int(m.group(1))
    return s


def problems(case, got, allocator):
    found = []
    kinds = {v["kind"] for v in got["verdicts"]}
    if kinds != case.expect:
        found.append(f"verdicts {sorted(kinds)}, expected {sorted(case.expect)}")
    for d in got["devices"]:
        total = sum(o["bytes"] for o in d["owners_at_peak"])
        if total != d["peak_allocated_bytes"]:
            found.append(f"owners add up to {total}, peak is {d['peak_allocated_bytes']}")
        if not 0 <= d["allocated_bytes"] <= d["reserved_bytes"] or d["violations"]:
            found.append(f"allocated {d['allocated_bytes']} reserved {d['reserved_bytes']} violations {d['violation_list']}")
        if "capacity_bytes" in d and d["reserved_bytes"] > d["capacity_bytes"]:
            found.append("more reserved than the capacity")
        if d["reserved_bytes"] != allocator.reserved or d["allocated_bytes"] != allocator.allocated:
            found.append(f"the allocator had {allocator.allocated} allocated and {allocator.reserved} reserved")
        if d["free_in_segments_bytes"] != d["reserved_bytes"] - d["allocated_bytes"] - d["pending_free_bytes"]:
            found.append("free in segments does not add up")
        if d.get("unrecorded_reason") != case.unrecorded:
            found.append(f"unrecorded reason {d.get('unrecorded_reason')} ({d['unrecorded_bytes']} bytes), expected {case.unrecorded}")
        if d.get("replay", {}).get("events_that_differ"):
            found.append(f"replay differs at {d['replay']}")
    advice = [a for v in got["verdicts"] for a in v["advice"]]
    for word in case.advice:
        if not any(word in a["setting"] for a in advice):
            found.append(f"no advice with \"{word}\": {advice}")
    for word in case.no_advice:
        if any(word in a["setting"] for a in advice):
            found.append(f"advice with \"{word}\": {advice}")
    for v in got["verdicts"]:
        if v["kind"] != "none" and v["bytes"] <= 0:
            found.append(f"{v['kind']} of no bytes")
        if not v["evidence"]:
            found.append(f"{v['kind']} without evidence")
    if case.check and not case.check(got):
        found.append("the case's own check fails")
    return found, advice


def check_advice(case, advice, allocator, row):
    """Every advised setting, run for real by the oracle: it must need less, and must not run out."""
    found = []
    for a in advice:
        if "_segments:" not in a["setting"] and "_size_mb:" not in a["setting"] and "divisions" not in a["setting"]:
            continue
        s = settings_with(a["setting"], case.settings)
        wide = Allocator(Device(1 << 44), s)
        run(case.program, wide, "stop")
        base = Allocator(Device(1 << 44), case.settings)
        run(case.program, base, "stop")
        saves = max(base.reserved_after) - max(wide.reserved_after)
        if row["failed_op"] is not None:
            # Only what was recorded can be promised: the same requests, up to and with the one that failed.
            upto = dataclasses.replace(case).program
            part = type(upto)()
            part.ops = upto.ops[: row["failed_op"] + 1]
            wide, base = Allocator(Device(1 << 44), s), Allocator(Device(1 << 44), case.settings)
            run(part, wide, "stop"), run(part, base, "stop")
            saves = max(base.reserved_after) - max(wide.reserved_after)
        row.setdefault("advice", []).append({"setting": a["setting"], "saves": a["saves_bytes"], "oracle_saves": saves})
        if case.unrecorded is None and abs(saves - a["saves_bytes"]) > 0.02 * max(base.reserved_after):
            found.append(f"{a['setting']} promises {a['saves_bytes']}, the oracle saves {saves}")
        if any(e["action"] == "oom" for e in allocator.events):
            tight = Allocator(Device(case.total, case.others), s)
            # The recording ends where it ran out; the advice must bring the program past that request.
            after = run(case.program, tight, "stop")
            if after is not None and after <= row["failed_op"]:
                found.append(f"{a['setting']} still runs out of memory at the same request")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("memfit")
    parser.add_argument("--out")
    parser.add_argument("--only")
    args = parser.parse_args()
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as tmp:
        for name, case in cases().items():
            if args.only and args.only not in name:
                continue
            allocator = Allocator(Device(case.total, case.others), case.settings)
            failed = run(case.program, allocator, case.on_oom)
            snap = snapshot([allocator], case.settings, keep_last=case.keep_last, old=case.old)
            if not case.history:
                snap["device_traces"] = [[]]
            if case.list_only:
                snap = snap["segments"]
            path = os.path.join(tmp, name + (".json" if case.form == "json" else ".pickle"))
            write(snap, path, case.form)
            done = subprocess.run([args.memfit, "explain", path, "--json", *case.flags], capture_output=True, text=True)
            row = {"case": name, "expect": sorted(case.expect), "failed_op": failed}
            if done.returncode:
                found = [f"exit {done.returncode}: {done.stderr}"]
            else:
                got = json.loads(done.stdout)
                row["verdicts"] = [v["kind"] for v in got["verdicts"]]
                found, advice = problems(case, got, allocator)
                found += check_advice(case, advice, allocator, row)
            row["problems"] = found
            bad += bool(found)
            rows.append(row)
            print("ok  " if not found else "BAD ", name, row.get("verdicts"), row.get("advice", ""), *found, flush=True)
    print(f"{len(rows)} cases, {bad} wrong")
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"cases": rows, "wrong": bad}, f, indent=1)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
