"""Gather, scatter and index ops in forward and backward, in place and out of place."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(8))

    def forward(self, x, places, rows):
        layer = iter(self.layers)
        h = torch.tanh(next(layer)(x))
        h = h.gather(1, places) + h.scatter(1, places, 0.5)
        h = torch.tanh(next(layer)(h))
        h = torch.zeros_like(h).scatter_add(1, places, h) * 0.5
        h = torch.relu(next(layer)(h))
        h = h + torch.zeros_like(h).scatter_reduce(1, places, h, reduce="amax", include_self=False)
        h = h.index_select(0, rows) + torch.zeros_like(h).index_add(0, rows, h)
        h = torch.tanh(next(layer)(h))
        h = h[rows] + torch.take_along_dim(h, places, 1)
        y = h.clone()
        y[rows[:100], 3] = 2.0
        y.index_put_((rows[:64], places[:64, 0]), torch.ones(64), accumulate=True)
        y.index_fill_(1, torch.tensor([1, 5]), 0.25)
        y = torch.sigmoid(next(layer)(y))
        y = torch.where(y > 0.5, y, h)
        y = y.masked_scatter(y < 0.1, torch.ones(y.numel()))
        picked = torch.masked_select(next(layer)(y), y > 0.6)
        y = next(layer)(y).take(places.flatten()[:4096]).view(-1, 8).mean() + picked.mean()
        corners = torch.nonzero(h > 1.0)
        z = next(layer)(h)
        return z + y + z[corners[:, 0], corners[:, 1]].sum() * 0.01 + z.put(rows, torch.ones(len(rows)))


def main():
    rec = Recorder(sys.argv)
    seed_everything(32)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    for step in range(4):
        x, labels = torch.randn(512, 48), torch.randint(0, 48, (512,))
        places = torch.argsort(torch.rand(512, 48), dim=1)
        rows = torch.randperm(512)
        logits = model(x, places, rows)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels, places, rows)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
