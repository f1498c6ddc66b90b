"""Modules made on the meta device, materialized with to_empty and assign, deferred (lazy) modules, default dtype changes."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(60)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 192), nn.LayerNorm(192), nn.Linear(192, 96))
    rec.add(0, "meta", model[0].weight)
    model.to_empty(device="cpu")
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.device("meta"):
        other = nn.Linear(96, 96)
    other.load_state_dict({"weight": torch.randn(96, 96) / 10, "bias": torch.zeros(96)}, assign=True)
    lazy = nn.LazyLinear(96)
    fast = nn.utils.skip_init(nn.Linear, 96, 96)
    nn.init.orthogonal_(fast.weight)
    nn.init.trunc_normal_(fast.bias)
    wide = nn.Linear(96, 96, dtype=torch.float64)
    modules = nn.ModuleList([model, other, lazy, fast, wide])
    lazy(torch.randn(1, 96))
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(1024, 96)
        h = fast(F.silu(lazy(F.tanh(other(model(x))))))
        loss = F.mse_loss(wide(h.double()), x.double())
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, modules)
        rec.fixed_bytes(modules, optimizer, x)
        optimizer.step()
        shape = torch.nn.functional.linear(x.to("meta"), model[0].weight.to("meta")).shape
        rec.add(step, "shape", tuple(shape))
        rec.optimizer(step, optimizer)
    rec.generators(0)
    rec.finish()


if __name__ == "__main__":
    main()
