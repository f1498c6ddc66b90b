#!/usr/bin/env python3
"""Train a small GPT, character by character, on text that every PyTorch brings along: its own documentation.

An ordinary PyTorch program that knows nothing of memfit. Most of its memory is activations.
    python examples/train_text.py --steps 8
"""
import argparse
import hashlib
import importlib.util
import pathlib

import torch
from torch import nn
from torch.nn import functional as F


def documentation() -> str:
    folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    return "".join((folder / name).read_text(encoding="utf-8") for name in ("_torch_docs.py", "_tensor_docs.py"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, symbols: int, context: int, width: int = 128, layers: int = 6, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.token, self.place = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, x):
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(h)))


def weights_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--context", type=int, default=128)
    arguments = parser.parse_args()
    torch.manual_seed(1)

    text = documentation()
    symbols = sorted(set(text))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    data = torch.tensor([number[symbol] for symbol in text], dtype=torch.uint8)
    model = Gpt(len(symbols), arguments.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    print(f"{len(text)} characters, {sum(p.numel() for p in model.parameters())} parameters", flush=True)

    loss = torch.tensor(float("nan"))
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(data) - arguments.context - 1, (arguments.batch,))
        rows = torch.stack([data[start:start + arguments.context + 1] for start in starts]).long()
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0 or step == arguments.steps:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    print(f"final loss {loss.item():.6f} weights {weights_hash(model)}")


if __name__ == "__main__":
    main()
