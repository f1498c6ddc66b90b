"""Inputs backed by NumPy arrays, memory-mapped files, bytes and shared buffers that the program refills between steps."""
import os
import sys
import tempfile

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(58)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.ReLU())), nn.Linear(96, 96))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "data.bin")
        numpy.random.randn(4 * 512, 96).astype(numpy.float32).tofile(path)
        mapped = numpy.memmap(path, dtype=numpy.float32, mode="r+", shape=(4 * 512, 96))
        whole = torch.from_file(path, shared=True, size=4 * 512 * 96).view(-1, 96)
        array = numpy.zeros((512, 96), dtype=numpy.float32)
        live = torch.from_numpy(array)  # one tensor, its content changes under it
        for step in range(4):
            array[:] = mapped[step * 512:(step + 1) * 512]
            y = model(live)
            z = model(whole[step * 512:(step + 1) * 512] * 0.5)
            packed = torch.frombuffer(bytearray(array[:64].tobytes()), dtype=torch.float32).view(64, 96)
            loss = F.mse_loss(y, live) + z.square().mean() + model(packed).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            array[:] = 0.0
            mapped[step * 512] = step  # seen through the other mapping
            rec.add(step, "loss", loss)
            rec.add(step, "row", whole[step * 512])
            rec.module(step, model)
            rec.fixed_bytes(model, optimizer, live)
            optimizer.step()
            rec.optimizer(step, optimizer)
        del whole, mapped
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
