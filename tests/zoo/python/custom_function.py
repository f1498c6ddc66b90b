"""Custom autograd Functions: saved tensors, non-input tensors kept on ctx, marked dirty, non-differentiable, once-differentiable."""
import sys

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from zoo import Recorder, seed_everything


class Swish(Function):
    @staticmethod
    def forward(ctx, x, beta):
        gate = torch.sigmoid(beta * x)
        ctx.save_for_backward(x, beta, gate)  # gate is neither input nor output
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, beta, gate = ctx.saved_tensors
        slope = gate * (1 - gate)
        return grad * (gate + x * beta * slope), (grad * x * x * slope).sum().reshape(beta.shape)


class KeptAside(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0  # kept without save_for_backward
        ctx.noise = torch.rand_like(x)
        return torch.where(ctx.mask, x, x * ctx.noise)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return torch.where(ctx.mask, grad, grad * ctx.noise)


class ClampInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.abs() < 1)
        ctx.mark_dirty(x)
        return x.clamp_(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        inside, = ctx.saved_tensors
        return grad * inside


class TopTwo(Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.topk(2, dim=-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return values, places

    @staticmethod
    def backward(ctx, grad, _):
        places, = ctx.saved_tensors
        return None if grad is None else grad.new_zeros(ctx.shape).scatter_(-1, places, grad)


class StraightThrough(Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad


def main():
    rec = Recorder(sys.argv)
    seed_everything(26)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(9))
    beta = nn.Parameter(torch.tensor([1.5]))
    optimizer = torch.optim.SGD([*layers.parameters(), beta], lr=0.05)
    for step in range(4):
        x = torch.randn(1024, 64)
        h = Swish.apply(layers[0](x), beta)
        h = KeptAside.apply(layers[1](h))
        h = ClampInPlace.apply(layers[2](h) * 1.0)
        for layer in layers[5:]:
            h = Swish.apply(KeptAside.apply(layer(h)), beta)
        values, places = TopTwo.apply(layers[3](h))
        h = StraightThrough.apply(layers[4](h) * 4) / 4
        loss = h.square().mean() + values.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "places", places)
        rec.add(step, "beta", beta.grad)
        rec.module(step, layers)
        rec.fixed_bytes(layers, beta, x)
        optimizer.step()
        rec.generators(step)
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
