"""Sparse gradients: Embedding and EmbeddingBag with sparse=True under SparseAdam, SGD and Adagrad."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(30)
    words, tags = nn.Embedding(2000, 48, sparse=True), nn.Embedding(500, 48, sparse=True, max_norm=2.0)
    bag = nn.EmbeddingBag(1000, 48, mode="mean", sparse=True)
    dense = nn.Sequential(nn.Linear(144, 128), nn.Tanh(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 20))
    optimizers = [torch.optim.SparseAdam(words.parameters(), lr=1e-2), torch.optim.SGD(tags.parameters(), lr=0.1),
                  torch.optim.Adagrad(bag.parameters(), lr=0.05), torch.optim.Adam(dense.parameters(), lr=1e-3)]
    model = nn.ModuleList([words, tags, bag, dense])
    for step in range(4):
        a, b = torch.randint(0, 2000, (64, 24)), torch.randint(0, 500, (64, 24))
        c, offsets = torch.randint(0, 1000, (64 * 24 * 3,)), torch.arange(0, 64 * 24 * 3, 3)
        x = torch.cat([words(a), tags(b), bag(c, offsets).view(64, 24, 48)], -1)
        loss = F.cross_entropy(dense(x).flatten(0, 1), torch.randint(0, 20, (64 * 24,)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizers, a, b, c, offsets)
        for optimizer in optimizers:
            optimizer.step()
            rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
