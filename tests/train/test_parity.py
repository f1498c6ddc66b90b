#!/usr/bin/env python3
"""Trains in Python and in C++ on the same weights, data and order, and compares: test_parity.py TRAIN_PROGRAM"""
import pathlib
import subprocess
import sys
import tempfile

import torch
from torch import nn
import torch.nn.functional as F

import tensors

STEPS = 50


def run(program, *words):
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def bits_equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def optimizers(program, folder):
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
        "adam": lambda p: torch.optim.Adam(p, weight_decay=0.01, amsgrad=True, fused=True),
        "adamw": lambda p: torch.optim.AdamW(p, fused=True),
        "adafactor": lambda p: torch.optim.Adafactor(p, weight_decay=0.1, foreach=False),
    }
    for kind, make in kinds.items():
        torch.manual_seed(2)
        parameters = {"a": torch.randn(70, 33), "b": torch.randn(129), "c": torch.randn(5, 6, 7)}
        given = dict(parameters)
        gradients = [{name: torch.randn_like(p) for name, p in parameters.items()} for _ in range(10)]
        for i, step in enumerate(gradients):
            given.update({f"{name}.{i}": g for name, g in step.items()})
        tensors.write(folder / "in.safetensors", given)
        run(program, "optimizer", kind, folder)
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        optimizer = make(list(leaves.values()))
        for step in gradients:
            for name, p in leaves.items():
                p.grad = step[name].clone()
            optimizer.step()
        ours = tensors.read(folder / "out.safetensors")
        for name, p in leaves.items():
            assert bits_equal(ours[name], p.detach()), f"{kind}: {name} differs by {(ours[name] - p).abs().max()}"
        print(f"{kind}: 10 steps, the same bits as Python")


def scaler(program, folder):
    torch.manual_seed(4)
    gradients = torch.randn(40, 4)
    for row, value in ((5, float("inf")), (6, float("nan")), (20, -float("inf")), (33, 3e38)):
        gradients[row, row % 4] = value
    tensors.write(folder / "in.safetensors", {"gradients": gradients})
    ours = run(program, "scaler", folder)
    w = torch.zeros(4, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.1, foreach=False, fused=False)
    scale = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)
    theirs = []
    for row in gradients:
        sgd.zero_grad()
        before = w.detach().clone()
        scale.scale((w * row).sum()).backward()
        scale.step(sgd)
        scale.update()
        theirs.append(f"{scale.get_scale():.17g} {scale.state_dict()['_growth_tracker']} {int(not torch.equal(before, w))}")
    assert ours == theirs, f"scaler: {ours} against {theirs}"
    assert bits_equal(tensors.read(folder / "out.safetensors")["w"], w.detach())
    print("scaler: 40 decisions as in Python")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.b, self.nb = nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32)
        self.c = nn.Linear(32, 10)

    def forward(self, x):
        return self.c(F.relu(self.nb(self.b(F.relu(self.na(self.a(x)))))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        rows, length, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(rows, length, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, d))
        return y + self.down(F.gelu(self.up(self.n2(y))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 64), nn.Embedding(24, 64)
        self.b0, self.b1, self.head = Block(64), Block(64), nn.Linear(64, 50)

    def forward(self, x):
        return self.head(self.b1(self.b0(self.words(x) + self.places.weight[: x.shape[1]]))).flatten(0, 1)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 50)

    def forward(self, x):
        return self.head(self.lstm(self.words(x))[0]).flatten(0, 1)


def models(program, folder):
    cases = {
        "mlp": (Mlp, lambda: (torch.randn(80, 32), torch.randint(10, (80,)))),
        "cnn": (Cnn, lambda: (torch.randn(80, 3, 12, 12), torch.randint(10, (80,)))),
        "gpt": (Gpt, lambda: (torch.randint(50, (80, 24)), torch.randint(50, (80, 24)))),
        "lstm": (Lstm, lambda: (torch.randint(50, (80, 24)), torch.randint(50, (80, 24)))),
    }
    for name, (make, data) in cases.items():
        torch.manual_seed(6)
        model = make()
        x, y = data()
        state = {k: v.clone() for k, v in model.state_dict().items()}
        tensors.write(folder / "in.safetensors", {**state, "data.x": x, "data.y": y})
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        theirs = []
        for step in range(STEPS):
            at = step * 16 % 80
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[at : at + 16]), y[at : at + 16].flatten())
            loss.backward()
            optimizer.step()
            theirs.append(loss.item())
        for split in (0,) if name == "cnn" else (0, 5):
            ours = [float(line) for line in run(program, "model", name, folder, split)]
            assert len(ours) == STEPS
            worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
            after = tensors.read(folder / "out.safetensors")
            same = all(bits_equal(after[k], v) for k, v in model.state_dict().items())
            how = f"in parts of {split} rows" if split else "unsplit"
            print(f"{name} {how}: largest relative difference of {STEPS} losses {worst:.2g}{', weights the same bits' if same else ''}")
            assert worst < 1e-6 if not split else worst < 1e-5, f"{name} {how}"


def main():
    program = sys.argv[1]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        optimizers(program, folder)
        scaler(program, folder)
        models(program, folder)


if __name__ == "__main__":
    main()
