"""Writes the TorchScript modules that the C++ zoo trains: make_modules.py FOLDER. Does nothing when they are there already."""
import os
import sys
import warnings
from typing import List

import torch
from torch import nn
from torch.nn import functional as F

warnings.filterwarnings("ignore", category=DeprecationWarning)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                                                 nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.convs:
            x = F.relu_(block(x).add_(x))
        return self.head(F.dropout(x.mean([2, 3]), 0.1, self.training))


class ControlFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        kept: List[torch.Tensor] = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if bool(x.mean() > 0.0):
                x = F.dropout(x, 0.1, self.training)
            else:
                x = x.clone()
                x[:, ::2] *= 0.5
            kept.append(x)
        return self.head(torch.stack(kept).mean(0))


def main():
    folder = sys.argv[1]
    names = ["residual.pt", "control_flow.pt", "traced.pt"]
    if all(os.path.exists(os.path.join(folder, name)) for name in names):
        return
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(7)
    traced = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 192), nn.LayerNorm(192), nn.SiLU(), nn.Linear(192, 10))
    modules = [torch.jit.script(Residual()), torch.jit.script(ControlFlow()), torch.jit.trace(traced, torch.randn(4, 64))]
    for name, module in zip(names, modules):
        path = os.path.join(folder, name)
        module.save(path + ".part")
        os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
