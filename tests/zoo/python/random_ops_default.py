"""Every random op on the default generator, its results used in the loss and in activations that are needed again."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def draws(h):
    """A list of tensors shaped as h, one for each way of drawing numbers."""
    kind = dict(dtype=h.dtype)
    shape = h.shape
    yield torch.rand(shape) + torch.rand_like(h)
    yield torch.randn(shape) * torch.randn_like(h)
    yield torch.randint(0, 9, shape).float() + torch.randint_like(h, 3, 7)
    yield torch.bernoulli(torch.full(shape, 0.4))
    yield torch.empty(shape, **kind).bernoulli_(0.3) + torch.empty(shape).bernoulli_(torch.full(shape, 0.6))
    yield torch.normal(torch.zeros(shape), torch.ones(shape)) + torch.normal(0.5, 2.0, shape)
    yield torch.normal(torch.zeros(shape), 0.1) + torch.normal(0.5, torch.ones(shape))
    yield torch.poisson(torch.full(shape, 2.5))
    yield torch.empty(shape).uniform_(-1, 1) + torch.empty(shape).normal_(0, 2)
    yield torch.empty(shape).exponential_(2.0) + torch.empty(shape).geometric_(0.3)
    yield torch.empty(shape).log_normal_(0.0, 0.25) + torch.empty(shape).cauchy_().clamp_(-3, 3)
    yield torch.empty(shape).random_(0, 5) + torch.empty(shape).random_(3) + torch.empty(shape).random_().fmod_(7)
    yield torch.binomial(torch.full(shape, 5.0), torch.full(shape, 0.5))
    yield torch._standard_gamma(torch.full(shape, 1.5)) + torch._sample_dirichlet(torch.full(shape, 0.7))
    yield torch.multinomial(torch.softmax(h.detach(), -1), h.shape[-1], replacement=True).float()
    yield torch.multinomial(torch.rand(shape) + 0.1, h.shape[-1], replacement=False).float()
    yield torch.randperm(h.numel()).view(shape).float() / h.numel()


def main():
    rec = Recorder(sys.argv)
    seed_everything(15)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(17))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.randn(256, 64)
        h = x
        for layer, noise in zip(model, draws(h)):
            h = torch.tanh(layer(h) * noise + 0.01 * noise)
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "h", h)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        rec.generators(step)
        with torch.random.fork_rng():
            torch.manual_seed(step)
            rec.add(step, "forked", torch.randn(8))
        state = torch.get_rng_state()
        rec.add(step, "after", torch.rand(4))
        torch.set_rng_state(state)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
