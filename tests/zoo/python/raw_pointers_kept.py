"""data_ptr and DLPack handles held across ops, read and written through ctypes, NumPy and storage objects."""
import ctypes
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import dlpack

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(29)
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(12))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    for step in range(4):
        x = torch.randn(640, 96)
        noise = torch.empty(640, 96)
        address = noise.data_ptr()
        h = early = torch.tanh(layers[0](x))
        shared = numpy.from_dlpack(h.detach())
        other = layers[1](h).detach()
        capsule = dlpack.to_dlpack(other)
        h = torch.relu(layers[2](h))
        for index in range(9):
            h = F.gelu(layers[3 + index](h))
        row = (ctypes.c_float * 96).from_address(address)
        for index in range(96):
            row[index] = index / 96
        ctypes.memmove(address + 96 * 4, address, 96 * 4)
        h = h + noise[:2].sum(0)
        again = dlpack.from_dlpack(capsule)
        storage = h.detach().untyped_storage()
        first = bytes(storage[:64])
        loss = (h * 0.01).square().mean() + again.mean() + float(shared.mean())
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "first", first)
        rec.add(step, "shared", shared.tobytes()[:4096])
        rec.add(step, "again", again)
        rec.module(step, layers)
        rec.fixed_bytes(layers, optimizer, x, noise, other, early.detach(), h.detach())  # looked at raw
        optimizer.step()
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
