"""Small real models whose whole training step the optimal solver can still take apart: small_models.py NAME | --list.

Activations are large beside the weights, so that limits below the peak are about activations. Trains six steps of the model named.
"""
import sys

import torch
from torch import nn
from torch.nn import functional as F


def chain(*layers):
    return nn.Sequential(*layers)


def mlp(depth, act, width=64):
    return chain(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), act())]), (512, width)


def conv(channels_in, channels, norm=True):
    layers = [nn.Conv2d(channels_in, channels, 3, padding=1)]
    return chain(*layers, *([nn.BatchNorm2d(channels)] if norm else []), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self, width, heads=2, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.heads, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, dropout

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, n, w))


def block(width, dropout=0.0):
    feed = chain(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    drop = [nn.Dropout(dropout)] if dropout else []
    return chain(Residual(chain(nn.LayerNorm(width), Attention(width), *drop)), Residual(chain(feed, *drop)))


class Unrolled(nn.Module):
    def __init__(self, cell, steps, width):
        super().__init__()
        self.cell, self.steps, self.width, self.two = cell, steps, width, isinstance(cell, nn.LSTMCell)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.width)
        state, out = (h, h) if self.two else h, []
        for _ in range(self.steps):
            state = self.cell(x, state)
            out.append(state[0] if self.two else state)
        return torch.stack(out)


class Unet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down, self.middle, self.up = conv(3, width), conv(width, 2 * width), conv(3 * width, width)

    def forward(self, x):
        skip = self.down(x)
        deep = F.interpolate(self.middle(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.up(torch.cat([skip, deep], 1))


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value, self.gate, self.out = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.out(self.value(x) * F.silu(self.gate(x)))


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.side = mlp(3, nn.Tanh)[0]

    def forward(self, x):
        return (self.side(x) - self.side(x.flip(0))).square()


MODELS = {
    "mlp4_tanh": lambda: mlp(4, nn.Tanh),
    "mlp6_relu": lambda: mlp(6, nn.ReLU),
    "mlp8_gelu": lambda: mlp(8, nn.GELU),
    "mlp10_sigmoid": lambda: mlp(10, nn.Sigmoid),
    "mlp12_elu": lambda: mlp(12, nn.ELU),
    "mlp5_dropout": lambda: (chain(*[l for _ in range(5) for l in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3))]), (512, 64)),
    "mlp6_norm": lambda: (chain(*[l for _ in range(6) for l in (nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU())]), (512, 64)),
    "residual_mlp5": lambda: (chain(*[Residual(chain(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())) for _ in range(5)]), (512, 64)),
    "gated3": lambda: (chain(*[Residual(Gated(48)) for _ in range(3)]), (512, 48)),
    "twins": lambda: (Twins(), (512, 64)),
    "cnn3": lambda: (chain(conv(3, 8), conv(8, 8), conv(8, 8)), (8, 3, 32, 32)),
    "cnn5": lambda: (chain(conv(3, 8), *[conv(8, 8) for _ in range(4)]), (8, 3, 32, 32)),
    "cnn4_plain": lambda: (chain(conv(3, 8, False), *[conv(8, 8, False) for _ in range(3)]), (8, 3, 32, 32)),
    "cnn4_pool": lambda: (chain(conv(3, 8), nn.MaxPool2d(2), conv(8, 16), nn.MaxPool2d(2), conv(16, 16), conv(16, 16)), (8, 3, 32, 32)),
    "resnet2": lambda: (chain(conv(3, 8), *[Residual(chain(conv(8, 8), nn.Conv2d(8, 8, 3, padding=1))) for _ in range(2)]), (8, 3, 32, 32)),
    "conv1d4": lambda: (chain(*[l for _ in range(4) for l in (nn.Conv1d(16, 16, 5, padding=2), nn.GELU())]), (16, 16, 256)),
    "autoencoder": lambda: (chain(conv(3, 8), nn.MaxPool2d(2), conv(8, 16), nn.Upsample(scale_factor=2), conv(16, 8)), (8, 3, 32, 32)),
    "unet1": lambda: (Unet(), (8, 3, 32, 32)),
    "gpt1": lambda: (block(32), (4, 64, 32)),
    "gpt1_dropout": lambda: (block(32, 0.1), (4, 64, 32)),
    "gpt2": lambda: (chain(block(32), block(32)), (4, 64, 32)),
    "attention2": lambda: (chain(Residual(Attention(32)), Residual(Attention(32))), (4, 64, 32)),
    "rnn6": lambda: (Unrolled(nn.RNNCell(64, 64), 6, 64), (256, 64)),
    "gru3": lambda: (Unrolled(nn.GRUCell(64, 64), 3, 64), (256, 64)),
    "lstm3": lambda: (Unrolled(nn.LSTMCell(64, 64), 3, 64), (256, 64)),
    # Several hundred ops: for the comparison with the best that the solver finds in a given time.
    "long_mlp40": lambda: mlp(40, nn.Tanh),
    "long_mlp_norm24": lambda: (chain(*[l for _ in range(24) for l in (nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU())]), (512, 64)),
    "long_cnn16": lambda: (chain(conv(3, 8), *[conv(8, 8) for _ in range(15)]), (8, 3, 32, 32)),
    "long_resnet8": lambda: (chain(conv(3, 8), *[Residual(chain(conv(8, 8), nn.Conv2d(8, 8, 3, padding=1))) for _ in range(8)]), (8, 3, 32, 32)),
    "long_gpt6": lambda: (chain(*[block(32) for _ in range(6)]), (4, 64, 32)),
    "long_gpt8_dropout": lambda: (chain(*[block(32, 0.1) for _ in range(8)]), (4, 64, 32)),
    "long_gated12": lambda: (chain(*[Residual(Gated(48)) for _ in range(12)]), (512, 48)),
    "long_rnn40": lambda: (Unrolled(nn.RNNCell(64, 64), 40, 64), (256, 64)),
    "long_lstm12": lambda: (Unrolled(nn.LSTMCell(64, 64), 12, 64), (256, 64)),
    "long_attention8": lambda: (chain(*[Residual(Attention(32)) for _ in range(8)]), (4, 64, 32)),
}


def main():
    name = sys.argv[1]
    if name == "--list":
        print("\n".join(MODELS))
        return
    torch.manual_seed(0)
    net, shape = MODELS[name]()
    x = torch.randn(*shape)
    for _ in range(6):
        for parameter in net.parameters():
            parameter.grad = None
        net(x).square().mean().backward()


main()
