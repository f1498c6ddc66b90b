"""Custom autograd Functions that leave PyTorch for NumPy in forward and in backward."""
import sys

import numpy
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class NumpyTanh(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.result = numpy.tanh(x.detach().numpy())  # a NumPy array, not a tensor
        return torch.from_numpy(ctx.result.copy())

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * (1 - ctx.result ** 2))


class NumpyWindow(Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.width = width
        padded = numpy.pad(x.detach().numpy(), ((0, 0), (width, 0)))
        total = numpy.cumsum(padded, axis=1, dtype=numpy.float64)
        return torch.as_tensor((total[:, width:] - total[:, :-width]).astype(numpy.float32))

    @staticmethod
    def backward(ctx, grad):
        padded = numpy.pad(grad.numpy(), ((0, 0), (0, ctx.width)))
        total = numpy.cumsum(padded[:, ::-1], axis=1, dtype=numpy.float64)[:, ::-1]
        return torch.from_numpy((total[:, :-ctx.width] - total[:, ctx.width:]).astype(numpy.float32)), None


def main():
    rec = Recorder(sys.argv)
    seed_everything(27)
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.from_numpy(numpy.random.randn(1024, 64).astype(numpy.float32))
        h = NumpyTanh.apply(model[0](x))
        h = NumpyWindow.apply(torch.relu(model[1](h)), 8)
        h = NumpyTanh.apply(model[2](h) * 0.1)
        for layer in model[3:9]:
            h = NumpyTanh.apply(F.gelu(layer(h)))
        loss = model[9](torch.sin(h)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
