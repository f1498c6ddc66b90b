"""DataLoader with forked workers, random augmentation in the workers, a custom collate and a persistent second loader."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from zoo import Recorder, seed_everything


class Pictures(Dataset):
    def __init__(self):
        self.data = torch.randn(64, 3, 32, 32)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        picture = self.data[index].roll(int(torch.randint(0, 4, ())), dims=2)
        return picture + 0.1 * torch.randn_like(picture), index % 10


def collate(samples):
    images, labels = zip(*samples)
    return torch.stack(images).mul_(0.5), torch.tensor(labels)


def main():
    rec = Recorder(sys.argv)
    seed_everything(40)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(layer for _ in range(5) for layer in (nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))),
                          nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=2, collate_fn=collate,
                        generator=torch.Generator().manual_seed(5), multiprocessing_context="fork")
    extra = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=8, num_workers=1, persistent_workers=True,
                       multiprocessing_context="fork", generator=torch.Generator().manual_seed(6))
    for step, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "images", images)
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.add(step, "extra", torch.cat([part for part, in extra]))
    rec.generators(step)
    rec.finish()


if __name__ == "__main__":
    main()
