"""Models that are exported and trained by the tests of memfit/model, each with its inputs and its loss."""
import math

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x)


class Cnn(nn.Module):
    """Batch norm and dropout."""
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.na = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.b, self.nb = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.nb(self.b(self.act(self.na(self.a(x)))))
        y += x
        return self.act(y)


class ResNet(nn.Module):
    """In-place sums and activations."""
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        a = self.down(x)
        return self.out(torch.cat([self.up(self.mid(a)), a], 1))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).split(c, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.out(F.gelu(self.fc(self.n2(x)))))


class Gpt(nn.Module):
    """The output layer is the embedding."""
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(GptBlock(16, 2), GptBlock(16, 2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(12), persistent=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(self.order[:tokens.shape[1]])
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class Encoder(nn.Module):
    """A mask as a second input."""
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.q, self.k, self.v, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, tokens, mask):
        x = self.tokens(tokens)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(16.0)
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        x = self.norm(x + self.drop(torch.softmax(scores, -1) @ self.v(x)))
        weights = mask.float()[:, :, None]
        return self.head((x * weights).sum(1) / weights.sum(1))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        y, _ = self.lstm(self.tokens(tokens))
        return self.head(y[:, -1])


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        y, _ = self.gru(x)
        return self.head(y.mean(1))


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard activations."""
    def __init__(self):
        super().__init__()
        self.wide, self.n1 = nn.Conv2d(3, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth, self.n2 = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = F.hardswish(self.n2(self.depth(F.hardswish(self.n1(self.wide(x))))))
        x = x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(x.mean((2, 3)))


class Siamese(nn.Module):
    """One encoder for two inputs."""
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, a, b):
        x, y = self.encode(a), self.encode(b)
        return torch.stack([F.cosine_similarity(x, y), (x - y).abs().mean(1), (x * y).sum(1), torch.cdist(x[:, None], y[:, None])[:, 0, 0]], 1)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv1d(2, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose1d(8, 2, 4, stride=2, padding=1)

    def forward(self, x):
        return self.up(self.down(x))


class Ema(nn.Module):
    """A buffer that the model assigns, not writes in place; a part under no_grad."""
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.cls, self.place = nn.Parameter(torch.randn(1, 1, 16) * 0.02), nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        self.block, self.head = GptBlock(16, 2), nn.Linear(16, 4)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.head(self.block(x)[:, 0])


class Branch(nn.Module):
    """Control flow that depends on data."""
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(10, 4), nn.Linear(10, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))


def rows(count, what):
    if what == "features":
        return (torch.randn(count, 10),)
    if what == "pairs":
        return torch.randn(count, 10), torch.randn(count, 10)
    if what == "images":
        return (torch.randn(count, 3, 8, 8),)
    if what == "series":
        return (torch.randn(count, 7, 6),)
    if what == "signal":
        return (torch.randn(count, 2, 16),)
    if what == "text":
        return (torch.randint(0, 30, (count, 9)),)
    if what == "masked":
        return torch.randint(0, 30, (count, 9)), torch.arange(9)[None] < torch.randint(1, 10, (count, 1))
    raise ValueError(what)


# model, its inputs
MODELS = {"mlp": (Mlp, "features"), "cnn": (Cnn, "images"), "resnet": (ResNet, "images"), "unet": (UNet, "images"), "gpt": (Gpt, "text"),
          "encoder": (Encoder, "masked"), "lstm": (Lstm, "text"), "gru": (Gru, "series"), "mobile": (Mobile, "images"),
          "siamese": (Siamese, "pairs"), "autoencoder": (AutoEncoder, "signal"), "ema": (Ema, "features"), "vit": (Vit, "images")}

# torch.jit.trace does not record that a buffer is assigned: in Python, too, the traced model's buffer stays as it was.
NOT_TRACEABLE = {"ema"}
