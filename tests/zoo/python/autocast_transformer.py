"""Autocast over attention with nested enabled/disabled regions, weight cache on and off, and a bfloat16 master copy."""
import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(21)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 4, 192, dropout=0.1, batch_first=True, norm_first=True), 3,
                                  enable_nested_tensor=False)
    low = copy.deepcopy(model).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(3):
        x = torch.randn(8, 64, 96)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=step != 1):
            y = model(x)
            z = model(x * 0.5)
        with torch.no_grad():
            wanted = low(x.bfloat16()).float()
        loss = F.mse_loss(y.float(), wanted) + z.float().abs().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, low)
        optimizer.step()
        with torch.no_grad():
            for mine, master in zip(low.parameters(), model.parameters()):
                mine.copy_(master)
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, low)
    rec.finish()


if __name__ == "__main__":
    main()
