"""Gradients accumulated over batches of different lengths and sizes; the last batch is small; step when enough tokens are in."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(63)
    embed, conv = nn.Embedding(100, 64), nn.Conv1d(64, 96, 5, padding=2)
    gru, head = nn.GRU(96, 64, batch_first=True), nn.Linear(64, 100)
    model = nn.ModuleList([embed, conv, gru, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens_seen, step = 0, 0
    for batch, length in [(16, 40), (8, 120), (24, 17), (4, 200), (16, 64), (32, 24), (3, 7), (12, 90)]:
        tokens = torch.randint(0, 100, (batch, length + 1))
        h = F.gelu(conv(embed(tokens[:, :-1]).transpose(1, 2))).transpose(1, 2)
        y, _ = gru(h)
        loss = F.cross_entropy(head(F.dropout(y, 0.1)).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        (loss / 1000).backward()
        tokens_seen += batch * length
        rec.add(step, "loss", loss)
        if tokens_seen >= 1500:
            rec.module(step, model)
            rec.fixed_bytes(model, optimizer, tokens)
            optimizer.step()
            optimizer.zero_grad()
            rec.optimizer(step, optimizer)
            tokens_seen, step = 0, step + 1
    rec.module(step, model)
    rec.generators(step)
    rec.finish()


if __name__ == "__main__":
    main()
