"""share_memory_ tensors: a forked child and a queue write what the parent trains on."""
import sys

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def fill(shared, wanted, done):
    torch.set_num_threads(1)  # a forked child has none of its parent's worker threads
    while True:
        step = wanted.get()
        if step is None:
            return
        generator = torch.Generator().manual_seed(step)
        shared.copy_(torch.randn(shared.shape, generator=generator))
        done.put((step, torch.full((1024,), float(step))))


def main():
    rec = Recorder(sys.argv)
    seed_everything(59)
    context = mp.get_context("fork")
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.GELU())), nn.Linear(96, 96))
    model[0].share_memory()  # one layer only: another process might write it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    shared = torch.zeros(1024, 96).share_memory_()
    wanted, done = context.Queue(), context.Queue()
    child = context.Process(target=fill, args=(shared, wanted, done), daemon=True)  # ends with its parent, refused or not
    child.start()
    for step in range(4):
        wanted.put(step)
        _, extra = done.get()
        moved = torch.tanh(shared * 2.0)
        moved.share_memory_()
        loss = F.mse_loss(model(moved), shared) + extra.mean() * 0.0
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "extra", extra)
        rec.module(step, model)
        rec.fixed_bytes(model, shared, moved)
        optimizer.step()
        del extra
    wanted.put(None)
    child.join()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
