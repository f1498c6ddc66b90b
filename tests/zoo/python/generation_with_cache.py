"""Inference mode between training steps: sampling with a key-value cache written in place, multinomial and beam search."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, cache=None, at=0):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache is not None:
            cache[0][:, :, at:at + length], cache[1][:, :, at:at + length] = k, v
            k, v = cache[0][:, :, :at + length], cache[1][:, :, :at + length]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return x + self.out(y.transpose(1, 2).flatten(2))


def main():
    rec = Recorder(sys.argv)
    seed_everything(62)
    embed, layers, head = nn.Embedding(64, 96), nn.ModuleList(Attention(96, 4) for _ in range(4)), nn.Linear(96, 64)
    model = nn.ModuleList([embed, layers, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens = torch.randint(0, 64, (16, 65))
        x = embed(tokens[:, :-1])
        for layer in layers:
            x = layer(x)
        loss = F.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        with torch.inference_mode():  # while the training graph is alive
            caches = [torch.zeros(2, 16, 4, 24, 24) for _ in layers]
            current, written = tokens[:, :1], [tokens[:, :1]]
            for at in range(24):
                h = embed(current)
                for layer, cache in zip(layers, caches):
                    h = layer(h, cache, at)
                current = torch.multinomial(F.softmax(head(h[:, -1]) / 0.8, -1), 1)
                written.append(current)
            rec.add(step, "written", torch.cat(written, 1))
            rec.add(step, "cache", caches[-1])
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, tokens)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.finish()


if __name__ == "__main__":
    main()
