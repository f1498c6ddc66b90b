"""torch.compile with the default backend: generated kernels read raw pointers, so only accounting can be expected."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

ACCOUNTING_ONLY = True  # the runner checks peak and exit, and the digests only where the run was allowed to finish


def main():
    rec = Recorder(sys.argv)
    seed_everything(49)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 16))
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):
        x, labels = torch.randn(1024, 64), torch.randint(0, 16, (1024,))
        loss = F.cross_entropy(compiled(x), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels)
        optimizer.step()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
