"""Weights shared: embedding and output head, one layer used at every depth, transposed use of one matrix, tied storage."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Universal(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 96)
        self.head = nn.Linear(96, 128, bias=False)
        self.head.weight = self.embed.weight
        self.layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.1, batch_first=True)
        self.code = nn.Parameter(torch.randn(96, 32) / 10)

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(4):
            x = self.layer(x)
        x = x + torch.tanh(x @ self.code) @ self.code.t()
        return self.head(x)


def main():
    rec = Recorder(sys.argv)
    seed_everything(35)
    model = Universal()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens = torch.randint(0, 128, (12, 48))
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, tokens)
        optimizer.step()
        rec.add(step, "tied", model.head.weight is model.embed.weight)
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
