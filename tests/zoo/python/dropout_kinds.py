"""All of dropout: elementwise, channel, alpha, feature alpha, in place, native, with RReLU and Gumbel softmax."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))
        self.head = nn.Linear(8 * 256, 10)
        self.rrelu = nn.RReLU(0.1, 0.4)

    def forward(self, x):
        conv = iter(self.convs)
        x = F.dropout(next(conv)(x), 0.2, self.training)
        x = F.dropout(next(conv)(x), 0.2, self.training, inplace=True)
        x = F.dropout2d(next(conv)(x), 0.2, self.training)
        x = F.alpha_dropout(F.selu(next(conv)(x)), 0.1, self.training)
        x = F.feature_alpha_dropout(next(conv)(x), 0.1, self.training)
        x = self.rrelu(next(conv)(x))
        x = F.rrelu(next(conv)(x), 0.1, 0.3, self.training, inplace=True)
        x, mask = torch.native_dropout(next(conv)(x), 0.3, True)
        picks = F.gumbel_softmax(x.flatten(2).transpose(1, 2), tau=0.7, hard=True)
        x = x * mask.float().mean() + (picks.transpose(1, 2).view_as(x) * 0.1)
        return self.head(F.dropout1d(x.flatten(2), 0.1, self.training).flatten(1))


def main():
    rec = Recorder(sys.argv)
    seed_everything(17)
    model = Net()
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    for step in range(4):
        images, labels = torch.randn(24, 8, 16, 16), torch.randint(0, 10, (24,))
        model.train()
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            rec.add(step, "evaluated", model(images).sum())
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
