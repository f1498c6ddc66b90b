"""NumPy views of live tensors, kept for many ops, read late and written to behind PyTorch's back."""
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(28)
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(12))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
    buffer = torch.zeros(640, 96)
    window = buffer.numpy()  # lives through the whole program
    weights = layers[11].bias.detach().numpy()
    for step in range(4):
        x = torch.randn(640, 96)
        peeks, held = [], []
        h = x
        for index, layer in enumerate(layers):
            h = torch.tanh(layer(h + buffer * 0.1 if index % 6 == 1 else h))
            if index % 4 == 0:
                held.append(h.detach())
                peeks.append(held[-1].numpy())  # alive until after backward
            window[:, index] = index + step
            if index == 3:
                scaled = (h.detach() * 2).numpy()
                scaled += 1.0
                h = h + torch.from_numpy(scaled) * 0.01
        seen = numpy.stack([p.mean(axis=0) for p in peeks])
        loss = F.mse_loss(h, x)
        optimizer.zero_grad()
        loss.backward()
        late = numpy.stack([p.astype(numpy.float64).sum(axis=0) for p in peeks])
        peeks[0][:] = 0.0  # the graph is gone, the activation is ours
        weights *= 0.99
        gradient = layers[0].weight.grad.numpy()
        gradient *= 0.5
        rec.add(step, "loss", loss)
        rec.add(step, "seen", seen.tobytes())
        rec.add(step, "late", late.tobytes())
        rec.add(step, "buffer", buffer)
        rec.module(step, layers)
        rec.fixed_bytes(layers, optimizer, x, buffer, held)  # a tensor that NumPy looks at stays
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
