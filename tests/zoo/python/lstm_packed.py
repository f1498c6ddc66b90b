"""Bidirectional two-layer LSTM over packed sequences of different lengths, with dropout between layers."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo import Recorder, seed_everything


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 48, padding_idx=0)
        self.lstm = nn.LSTM(48, 64, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.project = nn.LSTM(128, 48, proj_size=24, batch_first=True)
        self.head = nn.Linear(24, 12)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        packed, (hidden, cell) = self.lstm(packed)
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        y, _ = self.project(F.dropout(padded, 0.2, self.training))
        return self.head(y), hidden.sum() + cell.square().mean()


def main():
    rec = Recorder(sys.argv)
    seed_everything(7)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        lengths = torch.randint(30, 81, (24,))
        tokens = torch.randint(1, 200, (24, int(lengths.max())))
        tokens.masked_fill_(torch.arange(tokens.shape[1])[None] >= lengths[:, None], 0)
        tags = torch.randint(0, 12, tokens.shape)
        logits, extra = model(tokens, lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten()) + 1e-4 * extra
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rec.add(step, "loss", loss)
        rec.add(step, "norm", norm)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, tokens, tags)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
