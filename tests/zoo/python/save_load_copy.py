"""torch.save, torch.load, deepcopy and pickle in mid-training and in mid-graph; resume in a second model."""
import copy
import io
import pickle
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def build():
    return nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Dropout(0.1), nn.Linear(96, 96),
                         *(layer for _ in range(5) for layer in (nn.BatchNorm1d(96), nn.GELU(), nn.Linear(96, 96))))


def main():
    rec = Recorder(sys.argv)
    seed_everything(53)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(1024, 96)
        h = model[:4](x)
        aside = copy.deepcopy(h.detach())
        frozen = pickle.dumps(h.detach())
        y = model[4:](h)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "h": h, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, buffer)
        loss = F.mse_loss(y, x)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "aside", aside)
        rec.add(step, "thawed", pickle.loads(frozen))
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        twin = copy.deepcopy(model)
        rec.module(step, twin, "twin")
        if step == 1:
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
            rec.add(step, "stored", state["h"])
            model = build()
            model.load_state_dict(state["model"])
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
