#!/usr/bin/env python3
"""AdamW of memfit beside torch.optim.AdamW(fused=True), step for step in turn: adamw.py ADAMW_STEP [--steps N] [--json FILE]"""
import argparse
import json
import statistics
import subprocess
import sys
import time

import torch


def python_worker():
    torch.set_num_threads(2)
    torch.manual_seed(0)
    shapes = [(512, 512), (256, 512)]
    for _ in range(8):
        shapes += [(512,), (512,), (1536, 512), (1536,), (512, 512), (512,), (512,), (512,), (2048, 512), (2048,), (512, 2048), (512,)]
    parameters = [(torch.randn(s) * 0.02).requires_grad_() for s in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape) * 0.001
    optimizer = torch.optim.AdamW(parameters, fused=True)
    print(sum(p.numel() for p in parameters), len(parameters), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.step()
        print(time.perf_counter() - start, 0, flush=True)


class Worker:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.size = self.process.stdout.readline().split()

    def step(self):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        seconds, extra = self.process.stdout.readline().split()
        return float(seconds), int(extra)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    if sys.argv[1:] == ["--worker"]:
        return python_worker()
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--json")
    options = parser.parse_args()
    ours, theirs = Worker([options.program]), Worker([sys.executable, __file__, "--worker"])
    assert ours.size == theirs.size, (ours.size, theirs.size)
    times = {"memfit": [], "python": []}
    for step in range(options.steps + 2):  # the first makes the state
        a, b = ours.step()[0], theirs.step()[0]
        if step >= 2:
            times["memfit"].append(a)
            times["python"].append(b)
    ours.end()
    theirs.end()
    counter = Worker([options.program, "--count"])
    counter.step()
    extra = counter.step()[1]
    counter.end()
    result = {
        "torch": torch.__version__, "parameters": int(ours.size[0]), "tensors": int(ours.size[1]), "steps": options.steps,
        "memfit_ms": statistics.median(times["memfit"]) * 1e3, "python_fused_ms": statistics.median(times["python"]) * 1e3,
        "memfit_spread_ms": [min(times["memfit"]) * 1e3, max(times["memfit"]) * 1e3],
        "python_spread_ms": [min(times["python"]) * 1e3, max(times["python"]) * 1e3],
        "extra_bytes_a_step": extra,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        with open(options.json, "w") as out:
            json.dump(result, out, indent=1)


if __name__ == "__main__":
    main()
