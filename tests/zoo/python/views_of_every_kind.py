"""Views of every kind, read, differentiated through and written: as_strided, expand, split, unbind, unfold, view_as_complex."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 16)
        self.scale = nn.Parameter(torch.ones(1, 1, 128))

    def forward(self, x):
        h = self.a(x)  # 32, 32, 128
        strided = h.as_strided((32, 32, 64), (4096, 128, 2), 1)
        wide = self.scale.expand(32, 32, 128) * h
        left, right = wide.split([96, 32], -1)
        parts = left.chunk(3, -1)
        first, *rest = parts[0].unbind(0)
        windows = torch.tanh(h).unfold(1, 4, 4).sum(-1)
        turned = torch.view_as_complex(wide.view(32, 32, 64, 2)) * 1j
        back = torch.view_as_real(turned).flatten(2)
        picture = h.unflatten(-1, (8, 16)).movedim(1, -1).swapaxes(1, 2).squeeze().transpose(1, 3)
        corners = h[:, 1:-1:2, ..., None].permute(3, 0, 2, 1).diagonal(dim1=2, dim2=3)
        y = torch.sin(back + wide) + F.pad(strided, (0, 64)) + F.pad(torch.stack([first] + rest), (32, 64))
        y = y + picture.reshape(32, 32, 128) + right.repeat(1, 1, 4) + parts[1].tile(1, 1, 4)
        y = y + windows.repeat_interleave(4, 1) + corners.sum() + h.real.mT.mH.view_as(h).narrow(2, 0, 128)
        bits = y.detach().view(torch.int32).bitwise_and(1).float().mean()
        return self.c(torch.relu(self.b(y))), bits


def main():
    rec = Recorder(sys.argv)
    seed_everything(14)
    model = Net()
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    for step in range(4):
        base = torch.randn(64, 64)
        x = base.as_strided((32, 32, 64), (64, 64, 1)).clone()
        base.view(-1)[::7].mul_(2)
        target = torch.randint(0, 16, (1024,))
        logits, bits = model(x)
        loss = F.cross_entropy(logits.view(1024, 16), target)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "bits", bits)
        rec.add(step, "base", base)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, target, base)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
