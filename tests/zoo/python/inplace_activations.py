"""Every in-place activation and arithmetic that autograd allows, chained."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x):
        layer = iter(self.layers)
        x = F.relu_(next(layer)(x))
        x = F.leaky_relu_(next(layer)(x), 0.1)
        x = F.elu_(next(layer)(x))
        x = F.selu_(next(layer)(x))
        x = F.hardtanh_(next(layer)(x))
        x = next(layer)(x).sigmoid_()
        x = next(layer)(x).tanh_()
        x = F.silu(next(layer)(x), inplace=True)
        x = F.mish(next(layer)(x), inplace=True)
        x = next(layer)(x)
        x.add_(1.0).mul_(0.5).sub_(0.1).div_(2.0).clamp_(-1.0, 1.0)
        x = next(layer)(x)
        x[x > 1.0] = 0.5
        x.masked_fill_(x < -1.0, -0.5).addcmul_(x.detach(), x.detach(), value=0.1).neg_()
        y = next(layer)(x)
        y.mul_(0.5).sin_().lerp_(x, 0.25).t_().transpose_(0, 1)
        return y.view(-1, 8, 8).baddbmm_(x.view(-1, 8, 8), x.view(-1, 8, 8), beta=0.5).flatten(1)


def main():
    rec = Recorder(sys.argv)
    seed_everything(12)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    total = torch.zeros(())
    for step in range(4):
        x, target = torch.randn(1024, 64), torch.randn(1024, 64)
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        total += loss.detach()
        rec.add(step, "loss", loss)
        rec.add(step, "total", total)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, target)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.mul_(0.9).add_(parameter, alpha=1e-4)
        optimizer.step()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
