"""Transformer decoder with scaled_dot_product_attention (causal, and masked with dropout), SiLU gate and RMSNorm."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, cos, sin, mask):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, -1))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def main():
    rec = Recorder(sys.argv)
    seed_everything(2)
    width, heads, length, batch = 128, 4, 96, 8
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads)))
    cos, sin = angles.cos(), angles.sin()
    model = nn.ModuleDict({"embed": nn.Embedding(64, width),
                           "blocks": nn.ModuleList(Block(width, heads, 0.2) for _ in range(3)),
                           "head": nn.Linear(width, 64)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    for step in range(4):
        tokens = torch.randint(0, 64, (batch, length + 1))
        mask = torch.zeros(length, length).masked_fill_(torch.ones(length, length).triu(1).bool(), float("-inf"))
        x = model["embed"](tokens[:, :-1])
        for index, block in enumerate(model["blocks"]):
            x = block(x, cos, sin, mask if index % 2 else None)
        loss = F.cross_entropy(model["head"](x).flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, tokens, cos, sin, mask)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
