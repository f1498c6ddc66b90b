#!/usr/bin/env python3
"""memfit explain and memfit report --html beside pickle.load, the floor of every Python tool, in one run.

Each command runs alone, pinned to one core, in turn; times are of the whole process. Usage:
  bench_explain.py MEMFIT FILE... [--runs 5] [--out bench/results/snapshot_explain.json]
Files come from make_big.py.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

LOAD = "import pickle, sys\nwith open(sys.argv[1], 'rb') as f: pickle.load(f)"


def timed(command, core):
    def prepare():
        os.sched_setaffinity(0, {core})
        with open("/proc/self/oom_score_adj", "w") as f:  # where memory runs out, this is what goes
            f.write("1000")

    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=prepare)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return {"seconds": time.perf_counter() - start, "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_rss_bytes": usage.ru_maxrss * 1024, "exit": child.returncode}


def summary(rows):
    out = {"runs": len(rows), "exit": sorted({r["exit"] for r in rows})}
    for key in ("seconds", "cpu_seconds", "peak_rss_bytes"):
        values = [r[key] for r in rows]
        out[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return out


def machine():
    model = ""
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("memfit")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load-runs", type=int, help="runs of pickle.load, where its memory makes more too costly")
    parser.add_argument("--out")
    args = parser.parse_args()
    core = sorted(os.sched_getaffinity(0))[-1]
    results = []
    with tempfile.TemporaryDirectory() as tmp:
        page = os.path.join(tmp, "page.html")
        for path in args.files:
            size = os.path.getsize(path)
            with open(path, "rb") as f:  # into the page cache, for all of them
                while f.read(1 << 24):
                    pass
            info = json.loads(subprocess.run([args.memfit, "explain", path, "--json"], capture_output=True, check=True).stdout)
            events = sum(d["events"] for d in info["devices"])
            commands = {"pickle.load": [sys.executable, "-c", LOAD, path], "memfit explain": [args.memfit, "explain", path],
                        "memfit report --html": [args.memfit, "report", path, "--html", "--force", "--out", page]}
            rows = {name: [] for name in commands}
            for n in range(args.runs):
                for name, command in commands.items():
                    if name == "pickle.load" and args.load_runs is not None and n >= args.load_runs:
                        continue
                    rows[name].append(timed(command, core))
            entry = {"bytes": size, "events": events, "page_bytes": os.path.getsize(page), "commands": {k: summary(v) for k, v in rows.items()}}
            load, ours = entry["commands"]["pickle.load"], entry["commands"]["memfit explain"]
            entry["faster"] = load["seconds"]["median"] / ours["seconds"]["median"]
            entry["faster_cpu"] = load["cpu_seconds"]["median"] / ours["cpu_seconds"]["median"]
            entry["memory_allowed_bytes"] = size // 2 + 100_000_000
            entry["memory_held"] = ours["peak_rss_bytes"]["max"] <= entry["memory_allowed_bytes"]
            results.append(entry)
            print(f"{os.path.basename(path)}: {size / 1e6:.0f} MB, {events} events: pickle.load {load['seconds']['median']:.2f} s "
                  f"{load['peak_rss_bytes']['max'] / 1e6:.0f} MB; explain {ours['seconds']['median']:.2f} s {ours['peak_rss_bytes']['max'] / 1e6:.0f} MB "
                  f"({entry['faster']:.1f}x, of CPU time {entry['faster_cpu']:.1f}x; memory allowed {entry['memory_allowed_bytes'] / 1e6:.0f} MB); "
                  f"report {entry['commands']['memfit report --html']['seconds']['median']:.2f} s", flush=True)
            if args.out:
                with open(args.out, "w") as f:
                    json.dump({"machine": machine(), "command": " ".join(["bench_explain.py", *map(os.path.basename, args.files)]), "files": results}, f, indent=1)


if __name__ == "__main__":
    main()
