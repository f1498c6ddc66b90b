"""The same kinds of draws from generators that the program owns, two of them interleaved, one reseeded between uses."""
import sys

import torch
from torch import nn

from zoo import Recorder, seed_everything


def draws(h, first, second):
    shape = h.shape
    yield torch.rand(shape, generator=first)
    yield torch.randn(shape, generator=second)
    yield torch.randint(0, 9, shape, generator=first).float()
    yield torch.bernoulli(torch.full(shape, 0.4), generator=first) + torch.empty(shape).bernoulli_(0.5, generator=second)
    yield torch.normal(torch.zeros(shape), torch.ones(shape), generator=first)
    yield torch.normal(0.0, 1.0, shape, generator=second)
    yield torch.poisson(torch.full(shape, 2.5), generator=first)
    yield torch.empty(shape).uniform_(-1, 1, generator=first) + torch.empty(shape).normal_(0, 2, generator=first)
    yield torch.empty(shape).exponential_(2.0, generator=second) + torch.empty(shape).geometric_(0.3, generator=first)
    yield torch.empty(shape).log_normal_(0.0, 0.25, generator=second)
    yield torch.empty(shape).random_(0, 5, generator=first)
    yield torch.binomial(torch.full(shape, 5.0), torch.full(shape, 0.5), generator=second)
    yield torch.multinomial(torch.softmax(h.detach(), -1), h.shape[-1], replacement=True, generator=first).float()
    yield torch.randperm(h.numel(), generator=second).view(shape).float() / h.numel()


def main():
    rec = Recorder(sys.argv)
    seed_everything(16)
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(14))
    for layer in model:
        nn.init.kaiming_uniform_(layer.weight, generator=first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(4):
        second.manual_seed(100 + step)
        x = torch.randn(256, 64, generator=first)
        h = x
        for layer, noise in zip(model, draws(h, first, second)):
            h = torch.tanh(layer(h) * noise + 0.01 * noise)
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        rec.generators(step, first=first, second=second)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
