"""Training, then dynamic quantization, quantized tensors and fake quantization in the training loop."""
import copy
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

warnings.filterwarnings("ignore")


def main():
    rec = Recorder(sys.argv)
    seed_everything(51)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.Tanh())), nn.Linear(96, 96))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.randn(1024, 96)
        h = torch.fake_quantize_per_tensor_affine(model[:3](x), 0.05, 0, -128, 127)
        loss = F.mse_loss(model[3:](h), x)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x)
        optimizer.step()
        small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
        with torch.no_grad():
            rec.add(step, "quantized", small(x))
        packed = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
        channels = torch.quantize_per_channel(x, torch.full((96,), 0.1), torch.zeros(96, dtype=torch.long), 1, torch.qint8)
        rec.add(step, "packed", packed)
        rec.add(step, "unpacked", packed.dequantize() + channels.dequantize())
        rec.optimizer(step, optimizer)
    rec.finish()


if __name__ == "__main__":
    main()
