#!/usr/bin/env python3
"""What recording costs a training step: `memfit record` beside `memfit run` without a limit and plain PyTorch, stepping in turn.

Usage: record_cost.py MODEL [--steps 15] [--warm-ups 3] [--memfit build/bin/memfit]     (models as drive.py has them)
Prints the median step of each, the median of the ratios of neighbouring steps, and what memfit record said at its end.
"""
import argparse
import os
import statistics
import tempfile

import drive
import models


class Recording(drive.Mode):
    def command(self, model):
        worker = super().command(model)
        at = worker.index("--")
        return [self.memfit, "record", "-o", self.stem + ".mft", *worker[at:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=models.NAMES)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--least-steps", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--memfit", default=os.path.join(drive.ROOT, "build/bin/memfit"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="record_cost_") as folder:
        plain, run = drive.Mode("eager", "eager"), drive.Mode("memfit run, no limit", "eager", memfit=args.memfit)
        record = Recording("memfit record", "eager", memfit=args.memfit)
        modes = [plain, run, record]
        drive.measure(modes, args, folder)
        with open(record.stem + ".err") as file:
            said = [line for line in file.read().splitlines() if line.startswith("memfit:")]
    times = {mode: [sample["ms"] for sample in mode.samples[args.warm_ups:]] for mode in modes}
    for mode in modes:
        ms = times[mode]
        print(f"{mode.name:22} {statistics.median(ms):8.2f} ms ({min(ms):.2f} to {max(ms):.2f}), {len(ms)} steps, "
              f"load {statistics.median(s['busy_cores'] for s in mode.samples):.1f} cores")
    for other in (run, plain):
        ratios = [a / b for a, b in zip(times[record], times[other])]
        print(f"record / {other.name}: median of ratios {statistics.median(ratios):.4f}, "
              f"ratio of medians {statistics.median(times[record]) / statistics.median(times[other]):.4f}, "
              f"of minima {min(times[record]) / min(times[other]):.4f}")
    print("\n".join(said))


if __name__ == "__main__":
    main()
