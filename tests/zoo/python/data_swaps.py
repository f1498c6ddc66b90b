"""tensor.data read and replaced, set_, swap_tensors, resize_, storages emptied and refilled, weights swapped in mid-step."""
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

warnings.filterwarnings("ignore", category=UserWarning)


def main():
    rec = Recorder(sys.argv)
    seed_everything(56)
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    slow = [p.detach().clone() for p in layers.parameters()]
    scratch = torch.empty(0)
    for step in range(4):
        x = torch.randn(1024, 96)
        h = torch.tanh(layers[0](x))
        early = h
        h = torch.relu(layers[1](h))
        h.data.mul_(1.1)  # autograd does not see it
        h = torch.tanh(layers[2](h))
        scratch.resize_(1024, 96).copy_(h.detach())
        other = torch.zeros(1, 1)
        other.set_(scratch.untyped_storage(), 96, (512, 96), (96, 1))
        other.add_(1.0)
        h = layers[3](h) + scratch
        a, b = torch.sin(h.detach()), torch.cos(h.detach())
        torch.utils.swap_tensors(a, b)
        h = torch.tanh(layers[4](h)) + a * 0.1 - b * 0.01
        free = torch.exp(h.detach())
        size = free.untyped_storage().nbytes()
        free.untyped_storage().resize_(0)  # as sharded training does between uses
        h = torch.relu(layers[5](h))
        free.untyped_storage().resize_(size)
        free.fill_(0.5)
        loss = F.mse_loss(h * free, x) + early.mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "scratch", scratch)
        rec.module(step, layers)
        rec.fixed_bytes(layers, slow, x, scratch)
        optimizer.step()
        if step % 2 == 1:  # lookahead: the weights become other tensors
            for parameter, anchor in zip(layers.parameters(), slow):
                anchor.lerp_(parameter.detach(), 0.5)
                parameter.data = anchor.clone()
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
