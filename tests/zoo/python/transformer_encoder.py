"""nn.TransformerEncoder with padding masks; training steps between evaluations that may take the nested fast path."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(3)
    layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.1, activation="relu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=True)
    cross = nn.MultiheadAttention(96, 4, dropout=0.1, batch_first=True)
    head = nn.Linear(96, 10)
    model = nn.ModuleList([encoder, cross, head])
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    for step in range(4):
        x = torch.randn(16, 64, 96)
        lengths = torch.randint(20, 65, (16,))
        padding = torch.arange(64)[None, :] >= lengths[:, None]
        target = torch.randint(0, 10, (16,))
        model.train()
        memory = encoder(x, src_key_padding_mask=padding)
        y, weights = cross(memory[:, :8], memory, memory, key_padding_mask=padding)
        loss = F.cross_entropy(head(y.mean(1)), target) + weights.square().mean()
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, padding, target)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            rec.add(step, "evaluated", encoder(x, src_key_padding_mask=padding).mean())
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
