#!/usr/bin/env python3
"""What a training step costs, side by side: plain PyTorch, its own ways of saving memory, and memfit under several limits.

One process per mode; all stay alive and step in turn, one running at a time, so that what the machine does meanwhile hits all alike. Usage:
  drive.py MODEL [--steps 9] [--warm-ups 10] [--limits 0.7,0.5,94MiB] [--compile] [--cpp] [--seconds 200] [--out FILE]
With --cpp the models of worker.cpp (-DMEMFIT_BENCHES=ON builds it) run instead, and results go to step_cost_MODEL_cpp.json.
MODEL: gpt, resnet, lstm, unet, tree. A limit below 1 is a fraction of eager's peak, which memfit measures without a limit.
Prints one line per mode and writes every sample to bench/results/step_cost_MODEL.json; table.py makes tables of those files.
"""
import argparse
import datetime
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import models

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MIB = 1 << 20
LIMITS = {"gpt": "0.7,0.5,94MiB,80MiB"}
THREADS = 2
DID_NOT_FIT = 3


class Ended(Exception):
    pass


class Mode:
    """One way of running the model, and its process."""

    cpp = None  # the program that runs the models in C++

    def __init__(self, name, way, limit=None, memfit=None, plan=True):
        self.name, self.way, self.limit, self.memfit, self.plan = name, way, limit, memfit, plan
        self.samples, self.status, self.report, self.error = [], None, None, None

    def command(self, model):
        worker = [self.cpp, model] if self.cpp else [sys.executable, os.path.join(HERE, "worker.py"), model, self.way]
        if not self.memfit:
            return worker
        limit = ["--tensor-memory", f"{self.limit}B"] if self.limit else []
        limit += [] if self.plan else ["--no-plan"]
        return [self.memfit, "run", *limit, "--report", self.stem + ".json", "--", *worker]

    def start(self, model, folder):
        self.stem = os.path.join(folder, self.name.replace(" ", "_"))
        command = self.command(model)
        with open(self.stem + ".err", "w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                            start_new_session=True, env=dict(os.environ, OMP_NUM_THREADS=str(THREADS)))
        self.read(120)

    def read(self, seconds):
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.stop()
            raise Ended(f"no answer in {seconds} s")
        line = self.process.stdout.readline()
        if not line:
            raise Ended("ended")
        return json.loads(line)

    def stop(self):
        """Ends the process and its children: memfit's program must not outlive memfit."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def step(self, seconds=30):
        before = busy_seconds()
        try:
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Ended("ended") from None
        sample = self.read(seconds)
        sample["busy_cores"] = (busy_seconds() - before) / (sample["ms"] / 1e3)
        self.samples.append(sample)

    def end(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it ended before
        try:
            self.status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.stop()
            self.status = self.process.wait()
        if os.path.exists(self.stem + ".json"):
            with open(self.stem + ".json") as file:
                self.report = json.load(file)
        if self.status:
            with open(self.stem + ".err") as file:
                self.error = file.read().strip()[-400:]

    def row(self, warm_ups, eager):
        timed = self.samples[warm_ups:]
        row = {"mode": self.name, "limit_bytes": self.limit, "exit_status": self.status,
               "refused": self.status == DID_NOT_FIT, "error": self.error, "samples": self.samples}
        if timed:
            ms = [sample["ms"] for sample in timed]
            row.update(median_ms=statistics.median(ms), min_ms=min(ms), max_ms=max(ms))
            for key in ("loss", "gradients", "buffers"):
                row[key + "_equal"] = all(a[key] == b[key] for a, b in zip(self.samples, eager.samples))
            if len(eager.samples) > warm_ups:
                pairs = list(zip(timed, eager.samples[warm_ups:]))
                row["median_of_ratios"] = statistics.median(a["ms"] / b["ms"] for a, b in pairs)
                row["ratio"] = row["median_ms"] / statistics.median(b["ms"] for _, b in pairs)
        if self.report:
            keys = ("peak_bytes", "peak_rss_bytes", "unlimited_peak_bytes", "ops", "evictions", "recomputed_ops",
                    "recompute_seconds", "engine_seconds", "search_seconds", "planned_steps", "replanned", "predicted_peak_bytes", "predicted_step_seconds", "step_seconds",
                    "least_limit_bytes", "message")
            row.update({key: self.report.get(key) for key in keys})
            stepped = sum(sample["ms"] for sample in self.samples) / 1e3
            if stepped:  # the report is of the whole run, so its shares are of all steps, warm-ups included
                row.update(recompute_share=row["recompute_seconds"] / stepped, search_share=row["search_seconds"] / stepped,
                           engine_us_per_op=row["engine_seconds"] / max(row["ops"], 1) * 1e6)
        return row


def busy_seconds():
    """CPU time that the machine has spent so far on anything."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft_irq, *_ = (int(word) for word in file.readline().split()[1:9])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def peak_of(model, way, memfit, folder):
    """The peak of two steps without a limit, in bytes."""
    mode = Mode(f"peak of {way}", way, memfit=memfit)
    try:
        mode.start(model, folder)
        mode.step()
        mode.step()
    except Ended as why:
        print(f"  {mode.name}: {why}", flush=True)
    mode.end()
    if mode.status or not mode.report or mode.report["unlimited_peak_bytes"] is None:
        sys.exit(f"drive.py: memfit gave no peak for {model} {way}: {mode.error}")
    return mode.report["unlimited_peak_bytes"]


def limit_of(text, peak):
    if text.endswith("MiB"):
        return int(float(text[:-3]) * MIB)
    return int(float(text) * peak)


def modes_of(args, peak):
    modes = [Mode("eager", "eager")]
    if not args.cpp:
        modes.append(Mode("checkpoint", "checkpoint"))
    if args.compile:
        modes.append(Mode("compile budget 0.5", "compile"))
    modes.append(Mode("memfit, no limit", "eager", memfit=args.memfit))
    modes.append(Mode("memfit, limit not binding", "eager", limit=4 * peak, memfit=args.memfit))
    for text in args.limits.split(","):
        modes.append(Mode(f"memfit {text}, online", "eager", limit=limit_of(text, peak), memfit=args.memfit, plan=False))
        modes.append(Mode(f"memfit {text}", "eager", limit=limit_of(text, peak), memfit=args.memfit))
    return modes


def attempt(mode, action, *arguments):
    """Whether the mode is still there afterwards."""
    try:
        action(*arguments)
        return True
    except Ended as why:
        mode.end()
        mode.error = f"{why}: {mode.error}" if mode.error else str(why)
        print(f"  {mode.name}: {why}, exit {mode.status}: {(mode.error or '')[-200:]}", flush=True)
        return False


def measure(modes, args, folder):
    deadline = time.monotonic() + args.seconds
    alive = []
    try:
        for mode in modes:
            if not attempt(mode, mode.start, args.model, folder):
                continue
            alive.append(mode)
            for turn in range(args.warm_ups):
                if not attempt(mode, mode.step, 200 if mode.way == "compile" else 30):
                    alive.remove(mode)
                    break
        for turn in range(args.steps):
            if turn >= args.least_steps and time.monotonic() > deadline:
                print(f"  {args.seconds} s are over after {turn} steps of each", flush=True)
                break
            for mode in list(alive):
                if not attempt(mode, mode.step):
                    alive.remove(mode)
    finally:
        for mode in alive:
            mode.end()


def machine():
    facts = {"cpus": os.cpu_count()}
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                facts["cpu"] = line.split(":", 1)[1].strip()
                break
    with open("/proc/meminfo") as file:
        facts["memory_bytes"] = int(file.readline().split()[1]) * 1024
    return facts


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=models.NAMES)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each mode")
    parser.add_argument("--least-steps", type=int, default=5, help="timed steps even when the seconds are over")
    parser.add_argument("--warm-ups", type=int, default=10, help="a plan is made after two steps, and made anew with measured times after five more")
    parser.add_argument("--seconds", type=float, default=200, help="start no further round after so long")
    parser.add_argument("--limits", help="comma-separated: fractions of eager's peak, or sizes like 94MiB")
    parser.add_argument("--compile", action="store_true", help="torch.compile too; slow to start")
    parser.add_argument("--cpp", action="store_true", help="the models in C++")
    parser.add_argument("--memfit", default=os.path.join(ROOT, "build/bin/memfit"))
    parser.add_argument("--remark", help="kept with the results and printed under the table")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.limits = args.limits or LIMITS.get(args.model, "0.5")
    args.out = args.out or os.path.join(ROOT, "bench/results", f"step_cost_{args.model}{'_cpp' if args.cpp else ''}.json")
    if args.cpp:
        Mode.cpp = os.path.join(os.path.dirname(args.memfit), "step_cost_worker")
        if args.compile:
            parser.error("--compile: torch.compile is of Python only; leave out --cpp or --compile")
        if not os.path.exists(Mode.cpp):
            parser.error(f"{Mode.cpp} is not there: configure with -DMEMFIT_BENCHES=ON and build")
    return args


def show(row):
    if "median_ms" not in row:
        return f"{row['mode']:28} {'refused' if row['refused'] else 'failed'}, exit {row['exit_status']}"
    text = f"{row['mode']:28} {row['median_ms']:8.1f} ms ({row['min_ms']:.1f} to {row['max_ms']:.1f})  {row['ratio']:.3f}x"
    if "peak_bytes" in row:
        text += (f"  peak {row['peak_bytes'] / MIB:.1f} MiB, {row['evictions']} evictions, recompute {row['recompute_share']:.1%}, "
                 f"search {row['search_share']:.2%}")
    unequal = [key for key in ("loss", "gradients", "buffers") if not row[key + "_equal"]]
    return text + (f"  NOT EQUAL: {', '.join(unequal)}" if unequal else "") + ("  then REFUSED" if row["refused"] else "")


def main():
    args = arguments()
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="step_cost_") as folder:
        peaks = {way: peak_of(args.model, way, args.memfit, folder) for way in ("eager", "checkpoint") if way == "eager" or not args.cpp}
        print(f"{args.model}: " + ", ".join(f"{way} peak {peak / MIB:.1f} MiB" for way, peak in peaks.items()), flush=True)
        modes = modes_of(args, peaks["eager"])
        measure(modes, args, folder)
    rows = [mode.row(args.warm_ups, modes[0]) for mode in modes]
    result = {"model": args.model, "date": began, "machine": machine(), "torch_version": torch.__version__, "threads": THREADS,
              "warm_ups": args.warm_ups, "eager_peak_bytes": peaks["eager"], "checkpoint_peak_bytes": peaks.get("checkpoint"), "language": "C++" if args.cpp else "Python",
              "remark": args.remark, "load_average": os.getloadavg(), "modes": rows}
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    print("\n".join(show(row) for row in rows))


if __name__ == "__main__":
    main()
