"""Activations printed, listed and turned into Python numbers in mid-step; control flow on their values."""
import io
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(54)
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(16))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        x = torch.randn(640, 96)
        text = io.StringIO()
        h, first, shown = x, None, []
        for index, layer in enumerate(layers):
            h = torch.tanh(layer(h))
            first = h if first is None else first
            if index % 8 == 0:
                print(h, file=text)
                shown.append(h)
            else:
                print(h[:4, :4].clone(), file=text)
            print(f"{h.mean().item():.9f} {float(h[0, 0].detach()):.9f} {bool((h > 0.9).any())} {h.argmax()}", file=text)
            if h.norm() > 100:
                h = h * 0.5
        print(first, first[::300, ::32].tolist(), h.grad_fn.name(), h.shape, len(h), file=text)
        total = 0.0
        for row in first[:5]:
            total += sum(row.tolist())
        loss = F.mse_loss(h, x) * (1.0 + abs(total) * 1e-3)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "text", text.getvalue())
        rec.add(step, "total", total)
        rec.add(step, "loss", loss)
        rec.module(step, layers)
        rec.fixed_bytes(layers, optimizer, x, first, [t.detach() for t in shown])  # printing reads their bytes
        optimizer.step()
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
