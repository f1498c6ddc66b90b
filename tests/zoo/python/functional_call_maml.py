"""torch.func.functional_call with an inner loop that is differentiated through (MAML), second order."""
import sys

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(61)
    model = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Softplus(), nn.Linear(96, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        total = 0.0
        for task in range(2):
            x, query = torch.randn(256, 16), torch.randn(512, 16)
            shift = torch.randn(16)
            fast = dict(model.named_parameters())
            for _ in range(3):
                inner = F.mse_loss(functional_call(model, fast, (x,)), torch.sin(x + shift))
                grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: value - 0.1 * grad for (name, value), grad in zip(fast.items(), grads)}
            loss = F.mse_loss(functional_call(model, fast, (query,)), torch.sin(query + shift))
            loss.backward()
            total += loss.detach()
        rec.add(step, "loss", total)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, query)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.finish()


if __name__ == "__main__":
    main()
