"""DataLoader whose worker is spawned: the worker imports everything anew."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from zoo import Recorder, seed_everything


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(9)
        for _ in range(3 * 512):
            x = torch.randn(64, generator=generator)
            yield x, (x.sum() > 0).long()


def main():
    rec = Recorder(sys.argv)
    seed_everything(41)
    model = nn.Sequential(nn.Linear(64, 96), *(layer for _ in range(6) for layer in (nn.Tanh(), nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1))), nn.Linear(96, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(), batch_size=512, num_workers=1, multiprocessing_context="spawn")
    for step, (x, labels) in enumerate(loader):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "x", x)
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.generators(0)
    rec.finish()


if __name__ == "__main__":
    main()
