"""torch.compile with backend aot_eager: traced joint graphs run op by op, with a graph break in the middle."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))
        self.second = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 16))

    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.relu(h))


def main():
    rec = Recorder(sys.argv)
    seed_everything(48)
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        x, labels = torch.randn(768, 64), torch.randint(0, 16, (768,))
        loss = F.cross_entropy(compiled(x), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
