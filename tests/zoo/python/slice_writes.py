"""Writes into slices: rows of a buffer filled in a loop, masked writes, out= arguments, copy_, index_copy_, fill by view."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        canvas = x.new_zeros(len(self.cells) + 1, *x.shape)
        canvas[0] = x
        state = x
        for index, cell in enumerate(self.cells):
            state = torch.tanh(cell(state))
            canvas[index + 1] = state
            if index % 3 == 0:
                canvas[index + 1, ::2] *= 0.5
        y = canvas.clone()
        y[:, :, :16] = y[:, :, 16:32] * 2
        y[2:4].copy_(canvas[4:6])
        y.select(0, 5).narrow(1, 8, 16).zero_()
        y[1][y[1] > 0.8] = 0.0
        z = y.mean(0)
        z.index_copy_(0, torch.arange(0, 64, 2), z[1:65:2].clone())
        z.diagonal().add_(1.0)
        z.T[3:5].mul_(0.5)
        return self.head(z)


def main():
    rec = Recorder(sys.argv)
    seed_everything(13)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = torch.zeros(4, 512, 8)
    scratch = torch.empty(512, 64)
    for step in range(4):
        x, labels = torch.randn(512, 64), torch.randint(0, 8, (512,))
        torch.mul(x, 2.0, out=scratch)
        torch.add(scratch, 1.0, out=x)
        torch.cat([scratch[:256], x[:256]], out=scratch.view(512, 64).clone())
        logits = model(x)
        history[step] = logits.detach()
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "history", history)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels, history, scratch)
        optimizer.step()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
