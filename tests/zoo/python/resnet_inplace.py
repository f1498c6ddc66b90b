"""Residual net whose additions and activations are in place, with GroupNorm and BatchNorm blocks in turn."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Residual(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), norm(channels)

    def forward(self, x):
        y = F.relu_(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return y.relu_()


def main():
    rec = Recorder(sys.argv)
    seed_everything(6)
    norms = [nn.BatchNorm2d, lambda c: nn.GroupNorm(4, c)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16, norms[i % 2]) for i in range(6)),
                          nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    for step in range(3):
        images, labels = torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
