"""Sorting, top-k, unique, histograms, cumulative ops, quantiles, mode and median: multi-output ops and data-dependent shapes."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(33)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(9))
    optimizer = torch.optim.ASGD(layers.parameters(), lr=0.05)
    for step in range(4):
        x, labels = torch.randn(512, 64), torch.randint(0, 64, (512,))
        layer = iter(layers)
        h = torch.tanh(next(layer)(x))
        ordered, order = h.sort(dim=-1, descending=True, stable=True)
        h = torch.tanh(next(layer)(ordered)) + order.float() / 64
        values, places = h.topk(16, dim=-1, sorted=True)
        h = next(layer)(torch.cat([values, values.flip(-1), values.roll(3, -1), values * 2], -1))
        low, _ = h.kthvalue(5, dim=-1, keepdim=True)
        middle, where = h.median(dim=-1, keepdim=True)
        h = torch.relu(next(layer)(h - low)) + middle
        running, at = h.cummax(dim=-1)
        h = next(layer)(running) + h.cumsum(-1) * 0.01 + torch.logcumsumexp(h, -1) * 0.01
        most, _ = (h * 4).detach().round().mode(dim=-1)
        kinds, back, counts = torch.unique((h * 2).detach().long(), return_inverse=True, return_counts=True)
        h = next(layer)(h) + counts[back].float().log() * 0.01 + most[:, None] * 0.01
        runs = torch.unique_consecutive((h > 0).long().flatten())
        bins = torch.bincount((h.detach().abs() * 3).long().flatten(), minlength=32)
        h = torch.sigmoid(next(layer)(h)) * (1 + bins[:1] / 1e6) + torch.quantile(h, 0.25, dim=-1, keepdim=True)
        hist = torch.histc(h.detach(), bins=16, min=-2, max=2)
        spots = torch.searchsorted(torch.linspace(-2, 2, 64), h.detach())
        top, _ = h.max(dim=0)
        h = next(layer)(h) + top + spots / 64 + torch.logsumexp(h, 1, keepdim=True) + torch.bucketize(h.detach(), torch.linspace(-1, 1, 9))
        h = next(layer)(h.clamp(-3, 3)) + h.std(dim=-1, keepdim=True) + h.aminmax(dim=0).max
        loss = F.cross_entropy(h, labels)
        optimizer.zero_grad()
        loss.backward()
        for name, value in [("loss", loss), ("kinds", kinds), ("runs", runs), ("hist", hist), ("where", where), ("at", at), ("places", places)]:
            rec.add(step, name, value)
        rec.module(step, layers)
        rec.fixed_bytes(layers, optimizer, x, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
