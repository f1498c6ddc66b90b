"""Channels-last CNN with BatchNorm and in-place ReLU; grouped, dilated and transposed convolutions."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(5)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=2, dilation=2, stride=2), nn.BatchNorm2d(32), nn.ReLU6(inplace=True),
        nn.ConvTranspose2d(32, 16, 2, stride=2), nn.BatchNorm2d(16), nn.Hardswish(inplace=True),
        nn.AvgPool2d(2), nn.Conv2d(16, 24, 1), nn.PReLU(24), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for step in range(4):
        images = torch.randn(16, 3, 40, 40).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (16,))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "strides", [tuple(p.grad.stride()) for p in model.parameters()])
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
