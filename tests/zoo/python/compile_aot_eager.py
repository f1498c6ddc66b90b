"""torch.compile with backend aot_eager: traced joint graphs run op by op, with a graph break in the middle."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 96), *(layer for _ in range(3) for layer in (nn.GELU(), nn.Linear(96, 96), nn.LayerNorm(96))))
        self.second = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(96, 96), nn.Tanh())), nn.Linear(96, 16))

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
