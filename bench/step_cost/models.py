"""Five training steps of different kinds, each with fixed weights, data and seeds, so that every way of running one computes the same.

make(name, checkpointed) gives a Case. With checkpointed=True each natural block (a transformer block, a residual block, an LSTM layer,
a double convolution, a whole tree) goes through torch.utils.checkpoint; nothing else differs.
"""
import random
from dataclasses import dataclass
from typing import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A model whose blocks may be checkpointed."""

    checkpointed = False

    def block(self, function, *inputs):
        if self.checkpointed:
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


class TransformerBlock(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_feed = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def attention(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.feed(self.norm_feed(x)))


class GPT(Blocks):
    def __init__(self, vocabulary=512, width=256, depth=8, heads=4, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.block(layer, x)
        return self.head(x)


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


class ResNet(Blocks):
    def __init__(self, depth=12, channels=64, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(ResidualBlock(channels) for _ in range(depth))
        self.head = nn.Linear(channels, classes)

    def forward(self, pictures):
        x = self.stem(pictures)
        for layer in self.layers:
            x = self.block(layer, x)
        return self.head(x.mean((2, 3)))


class Tagger(Blocks):
    """Two bidirectional LSTM layers, each a module of its own, and a tag for every token."""

    def __init__(self, vocabulary=10000, width=256, tags=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lower = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.upper = nn.LSTM(2 * width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in (self.lower, self.upper):
            x, _ = self.block(layer, x)
        return self.head(x)


def double_convolution(inputs, outputs):
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(Blocks):
    def __init__(self, base=16, levels=4, classes=4):
        super().__init__()
        widths = [base * 2**level for level in range(levels + 1)]
        self.encoders = nn.ModuleList(double_convolution(i, o) for i, o in zip([3] + widths, widths[:-1]))
        self.bottom = double_convolution(widths[-2], widths[-1])
        rising = list(zip(widths[:0:-1], widths[-2::-1]))
        self.raises = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, 2) for deep, shallow in rising)
        self.decoders = nn.ModuleList(double_convolution(2 * shallow, shallow) for _, shallow in rising)
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, pictures):
        x, skips = pictures, []
        for encoder in self.encoders:
            x = self.block(encoder, x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.block(self.bottom, x)
        for raised, decoder in zip(self.raises, self.decoders):
            x = self.block(decoder, torch.cat([skips.pop(), raised(x)], 1))
        return self.head(x)


class TreeLSTM(Blocks):
    """The binary TreeLSTM, by recursion: the control flow depends on the data, and a node's tensors are tiny."""

    def __init__(self, vocabulary=1000, width=128, classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.leaf = nn.Linear(width, 2 * width)
        self.cell = nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, classes)

    def node(self, tree):
        if isinstance(tree, int):
            memory, out = self.leaf(self.embedding(torch.tensor([tree]))).chunk(2, 1)
        else:
            (left, left_memory), (right, right_memory) = self.node(tree[0]), self.node(tree[1])
            gates = self.cell(torch.cat([left, right], 1)).chunk(5, 1)
            enter, keep_left, keep_right, out, new = gates
            memory = (torch.sigmoid(enter) * torch.tanh(new) + torch.sigmoid(keep_left) * left_memory
                      + torch.sigmoid(keep_right) * right_memory)
        return torch.sigmoid(out) * torch.tanh(memory), memory

    def root(self, tree):
        return self.node(tree)[0]

    def forward(self, trees):
        return self.head(torch.cat([self.block(self.root, tree) for tree in trees]))


def random_tree(source, leaves):
    if leaves == 1:
        return source.randrange(1000)
    left = source.randrange(1, leaves)
    return random_tree(source, left), random_tree(source, leaves - left)


NAMES = ("gpt", "resnet", "lstm", "unet", "tree")


@dataclass
class Case:
    net: nn.Module
    forward: Callable  # the net, or what torch.compile makes of it
    inputs: object
    targets: torch.Tensor

    def loss(self):
        out = self.forward(self.inputs)
        if self.targets.dim() == 2:  # a class for every token
            return F.cross_entropy(out.flatten(0, 1), self.targets.flatten())
        return F.cross_entropy(out, self.targets)


def make(name, checkpointed=False):
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(7)

    def below(limit, *shape):
        return torch.randint(0, limit, shape, generator=data)

    if name == "gpt":
        net, inputs, targets = GPT(), below(512, 8, 256), below(512, 8, 256)
    elif name == "resnet":
        net, inputs, targets = ResNet(), torch.randn(16, 3, 64, 64, generator=data), below(10, 16)
    elif name == "lstm":
        net, inputs, targets = Tagger(), below(10000, 32, 200), below(64, 32, 200)
    elif name == "unet":
        net, inputs, targets = UNet(), torch.randn(4, 3, 128, 128, generator=data), below(4, 4, 128, 128)
    elif name == "tree":
        source = random.Random(3)
        net, inputs, targets = TreeLSTM(), [random_tree(source, 64) for _ in range(16)], below(5, 16)
    else:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(NAMES)}")
    net.checkpointed = checkpointed
    return Case(net, net, inputs, targets)
