"""weight_norm, spectral_norm (power iteration writes buffers in forward), orthogonal and own parametrizations, pruning."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from zoo import Recorder, seed_everything


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def main():
    rec = Recorder(sys.argv)
    seed_everything(57)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(64, 64)), nn.Tanh(),
                          parametrizations.orthogonal(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64),
                          nn.utils.spectral_norm(nn.Linear(64, 64)))
    parametrize.register_parametrization(model[6], "weight", Symmetric())
    prune.l1_unstructured(model[8], "weight", amount=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(2048, 64)
        with parametrize.cached():
            y = model(x)
            loss = F.mse_loss(y, x) + model(x[:256]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        rec.optimizer(step, optimizer)
    model.eval()
    rec.add(step, "evaluated", model(x))
    rec.finish()


if __name__ == "__main__":
    main()
