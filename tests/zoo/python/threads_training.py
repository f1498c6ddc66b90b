"""Three Python threads, each training its own model with its own generator."""
import sys
import threading

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def train(index, model, results):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(index)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    part = Recorder([""])
    for step in range(4):
        x = torch.randn(512, 64, generator=generator)
        noise = torch.bernoulli(torch.full((512, 64), 0.9), generator=generator)
        loss = F.mse_loss(model(x * noise), x)
        optimizer.zero_grad()
        loss.backward()
        part.add(step, "loss", loss)
        part.module(step, model)
        part.fixed_bytes(model, optimizer, x)
        optimizer.step()
        part.optimizer(step, optimizer)
        part.generators(step, own=generator)
    results[index] = part


def main():
    rec = Recorder(sys.argv)
    seed_everything(42)
    models = [nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True),
                            nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    results = {}
    threads = [threading.Thread(target=train, args=(index, model, results)) for index, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(3):
        rec.merge(f"thread{index}", results[index].entries)
    rec.most_fixed = sum(part.most_fixed for part in results.values())
    rec.finish()


if __name__ == "__main__":
    main()
