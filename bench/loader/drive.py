#!/usr/bin/env python3
"""memfit's loader beside Python's DataLoader: samples a second and memory over the data, in turn, several runs each.

    drive.py BENCH PYTHON [--runs 5] [--threads 0,1,2,4] [--json FILE]

BENCH is data_loader_bench (a build with -DMEMFIT_BENCHES=ON), PYTHON one that has torch.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess


def run(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def summary(runs):
    steady = [max(one["steady"]) for one in runs]
    return {"steady_median": statistics.median(steady), "steady_spread": [min(steady), max(steady)],
            "over_data_mib": statistics.median(one["peak_mib"] - one["base_mib"] for one in runs),
            "first_ms": statistics.median(one["first_ms"] for one in runs), "runs": runs}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("python")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", default="0,1,2,4")
    parser.add_argument("--json")
    options = parser.parse_args()
    peer = pathlib.Path(__file__).parent / "peer.py"
    names = [int(word) for word in options.threads.split(",")]
    results = {(who, n): [] for n in names for who in ("python", "memfit")}
    for _ in range(options.runs):
        for who, n in results:
            results[who, n].append(run([options.python, str(peer), str(n)] if who == "python" else [options.bench, str(n)]))
    table = {f"{who}.{n}": summary(runs) for (who, n), runs in results.items()}
    for name, row in table.items():
        print(f"{name:10} {row['steady_median']:8.0f} samples/s {row['steady_spread']}  {row['over_data_mib']:6.0f} MiB over the data  "
              f"first batch {row['first_ms']:.1f} ms")
    if options.json:
        facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "runs": options.runs}
        pathlib.Path(options.json).write_text(json.dumps({"facts": facts, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
