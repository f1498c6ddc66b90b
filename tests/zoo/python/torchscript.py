"""TorchScript in Python: a scripted net with control flow and dropout, a traced net, both trained, saved and loaded."""
import io
import sys
import warnings
from typing import List

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

warnings.filterwarnings("ignore", category=DeprecationWarning)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        kept: List[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if float(x.mean()) > 0.0:
                x = self.drop(x)
            else:
                x = F.relu(x) - 0.1
            kept.append(x)
        return torch.stack(kept).mean(0)


def main():
    rec = Recorder(sys.argv)
    seed_everything(50)
    scripted = torch.jit.script(Scripted())
    traced = torch.jit.trace(nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 96)), torch.randn(8, 96))
    model = nn.ModuleList([scripted, traced])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(1024, 96)
        loss = F.mse_loss(traced(scripted(x)), x)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    again = torch.jit.load(buffer)
    scripted.eval(), again.eval()
    frozen = torch.jit.freeze(again)
    with torch.no_grad():
        rec.add(step, "again", frozen(x))
    rec.finish()


if __name__ == "__main__":
    main()
