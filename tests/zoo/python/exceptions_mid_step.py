"""Exceptions in mid-forward, in backward hooks and inside ops; allocations that cannot succeed; training goes on after each."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Interrupted(Exception):
    pass


def main():
    rec = Recorder(sys.argv)
    seed_everything(47)
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(8))
    norm = nn.BatchNorm1d(96)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)

    def forward(x, fail_at=None):
        h = x
        for index, layer in enumerate(layers):
            h = F.dropout(torch.tanh(layer(h)), 0.1)
            if index == 3:
                h = norm(h)
            if index == fail_at:
                raise Interrupted
        return h

    def refuse(grad):
        raise Interrupted

    for step in range(4):
        x = torch.randn(1024, 96)
        kept = None
        try:
            forward(x, fail_at=5)
        except Interrupted:
            rec.add(step, "forward", "interrupted")
        try:
            h = forward(x)
            h.register_hook(refuse)
            (h * 2).sum().backward()
        except Interrupted as error:
            kept = error  # the traceback holds the frames and their tensors
        try:
            torch.add(x, torch.randn(7, 3))
        except RuntimeError:
            rec.add(step, "shapes", "refused")
        try:
            x.add_(torch.randn(1024, 96, 3))
        except RuntimeError:
            rec.add(step, "in place", "refused")
        try:
            torch.empty(1 << 52)
        except RuntimeError:  # torch.OutOfMemoryError is one
            rec.caught_out_of_memory()
            rec.add(step, "allocation", "refused")
        try:
            F.embedding(torch.tensor([99]), torch.randn(5, 4))
        except IndexError:
            rec.add(step, "index", "refused")
        loss = F.mse_loss(forward(x), x)
        optimizer.zero_grad()
        loss.backward()
        del kept
        rec.add(step, "loss", loss)
        rec.module(step, layers)
        rec.module(step, norm, "norm")
        rec.fixed_bytes(layers, norm, optimizer, x)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
