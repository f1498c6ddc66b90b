"""CNN with BatchNorm in training mode: plain, momentum None, no running statistics; forwards without a backward."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24, momentum=None)
        self.conv3, self.bn3 = nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24, track_running_stats=False)
        self.conv4, self.bn4 = nn.Conv2d(24, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32, affine=False)
        self.instance = nn.InstanceNorm2d(32, track_running_stats=True)
        self.head, self.bn5 = nn.Linear(32, 10), nn.BatchNorm1d(10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x)))
        x = self.instance(F.relu(self.bn4(self.conv4(x))))
        return self.bn5(self.head(x.mean((2, 3))))


def main():
    rec = Recorder(sys.argv)
    seed_everything(4)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        model.train()
        unused = model(images.flip(3))  # moves the statistics, never goes backward
        with torch.no_grad():
            model(images.flip(2))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "unused", unused.sum())
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        model.eval()
        rec.add(step, "evaluated", model(images).sum())
        model.bn1.train()  # only one layer in training mode
        with torch.no_grad():
            rec.add(step, "half", model(images).sum())
        rec.optimizer(step, optimizer)
    model.train()
    model.bn2.reset_running_stats()
    model(images).sum().backward()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
