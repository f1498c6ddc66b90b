"""Reentrant torch.utils.checkpoint around BatchNorm blocks with dropout: backward runs inside backward."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(23)
    blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True),
                                         nn.Dropout(0.1), nn.Conv2d(12, 12, 3, padding=1)) for _ in range(3))
    plain = nn.ModuleList(nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Tanh()) for _ in range(5))
    stem, head = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12, 10)
    model = nn.ModuleList([stem, blocks, plain, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        images, labels = torch.randn(10, 3, 32, 32), torch.randint(0, 10, (10,))
        x = stem(images)
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        for block in plain:
            x = x + block(x)
        loss = F.cross_entropy(head(x.mean((2, 3))), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
