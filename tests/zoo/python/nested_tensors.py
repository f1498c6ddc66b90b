"""Nested tensors, strided and jagged, through linear layers, attention, padding and reductions, with gradients."""
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

warnings.filterwarnings("ignore", category=UserWarning)


def main():
    rec = Recorder(sys.argv)
    seed_everything(52)
    first, second, third = nn.Linear(64, 96), nn.Linear(96, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    model = nn.ModuleList([first, second, third])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        parts = [torch.randn(int(n), 64) for n in torch.randint(20, 80, (24,))]
        nested = torch.nested.nested_tensor(parts)
        h = second(F.gelu(first(nested)))
        padded = torch.nested.to_padded_tensor(h, 0.0)
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
        y = jagged
        for layer in third:
            y = torch.tanh(layer(y)) * jagged
        loss = padded.square().mean() + y.values().square().mean() + sum(t.sum() for t in h.unbind()) * 1e-4
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "padded", padded)
        rec.add(step, "jagged", y.values())
        rec.module(step, model)
        rec.fixed_bytes(model, parts)
        optimizer.step()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
