"""torch.utils.checkpoint without reentry, nested in itself, with dropout and an early-stop region, and checkpoint_sequential."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from zoo import Recorder, seed_everything


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def inner(self, x):
        return F.dropout(F.gelu(self.up(x)), 0.2, self.training)

    def forward(self, x, nested):
        h = self.norm(x)
        return x + self.down(checkpoint(self.inner, h, use_reentrant=False) if nested else self.inner(h))


def main():
    rec = Recorder(sys.argv)
    seed_everything(22)
    first = nn.ModuleList(Block(32) for _ in range(8))
    second = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)))
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(1024, 32)
        h = x
        for index, block in enumerate(first):
            h = checkpoint(block, h, True, use_reentrant=False, preserve_rng_state=True) if index % 2 else block(h, False)
        h = checkpoint_sequential(second, 3, h, use_reentrant=False)
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
