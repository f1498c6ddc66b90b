"""Python's DataLoader on the case of memfit/data/data_loader_bench.cpp: rows of float32 [3,64,64] in one tensor, each flipped
at random and normalised, batch 64, shuffled. The consumer reads one element. Prints one line of JSON.

    peer.py WORKERS [ROWS]
"""
import json
import os
import random
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, rows):
        self.x, self.y = torch.randn(rows, 3, 64, 64), torch.randint(0, 10, (rows,))
        self.mean, self.deviation = torch.tensor([.1, .2, .3]).view(3, 1, 1), torch.tensor([.9, 1., 1.1]).view(3, 1, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if random.random() < .5:
            x = x.flip(-1)
        return (x - self.mean) / self.deviation, self.y[i]


def family(pid):
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in file.read().split():
                found += family(int(child))
    return found


def pss_mib():
    total = 0
    for pid in family(os.getpid()):
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except OSError:
            pass  # a worker that has ended
    return total / 1024


def epoch(loader, probe=False):
    begin, peak, rows, eighth, first = time.perf_counter(), 0, 0, None, None
    for i, (x, _) in enumerate(loader):
        x[0, 0, 0, 0].item()
        rows += len(x)
        if i == 0:
            first = time.perf_counter()
        if i == 7:
            eighth, rows_then = time.perf_counter(), rows
        if probe and i % 40 == 20:  # stalls the processes, so never while timing
            peak = max(peak, pss_mib())
    end = time.perf_counter()
    return (rows - rows_then) / (end - eighth), rows / (end - begin), (eighth - begin) * 1e3, (first - begin) * 1e3, peak


def main():
    workers, rows = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20000
    torch.manual_seed(0)
    data = Pictures(rows)
    base = pss_mib()
    loader = DataLoader(data, 64, shuffle=True, drop_last=True, num_workers=workers, prefetch_factor=2 if workers else None)
    timed = [epoch(loader) for _ in range(2)]
    peak = epoch(loader, True)[4]
    print(json.dumps({"workers": workers, "steady": [round(x[0]) for x in timed], "whole": [round(x[1]) for x in timed],
                      "first8_ms": round(max(x[2] for x in timed), 1), "first_ms": round(max(x[3] for x in timed), 1),
                      "peak_mib": round(peak), "base_mib": round(base)}))


if __name__ == "__main__":
    main()
