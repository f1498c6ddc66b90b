"""LBFGS with closures and strong-Wolfe line search, history across steps."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(38)
    model = nn.Sequential(nn.Linear(32, 48), *(layer for _ in range(7) for layer in (nn.Tanh(), nn.Linear(48, 48))), nn.Tanh(), nn.Linear(48, 32))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, history_size=4, line_search_fn="strong_wolfe")
    x = torch.randn(1536, 32)
    target = torch.sin(x * 2).roll(1, 1)
    calls = 0
    for step in range(3):
        def closure():
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(x), target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        rec.add(step, "loss", loss)
        rec.add(step, "calls", calls)
        rec.module(step, model)
        rec.optimizer(step, optimizer)
        rec.fixed_bytes(model, optimizer, x, target)
    rec.finish()


if __name__ == "__main__":
    main()
