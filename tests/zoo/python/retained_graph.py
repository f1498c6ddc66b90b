"""Graphs kept and run twice: retain_graph, separate grads of several losses, Hessian-vector products, PCGrad style surgery."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(25)
    trunk = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 128), nn.Tanh())
    heads = nn.ModuleList(nn.Linear(128, 8) for _ in range(3))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = list(trunk.parameters())
    for step in range(4):
        x, labels = torch.randn(1024, 64), torch.randint(0, 8, (1024,))
        h = trunk(x)
        losses = [F.cross_entropy(head(h), labels) * (index + 1) for index, head in enumerate(heads)]
        grads = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        dot = sum((a * b).sum() for a, b in zip(grads[0], grads[1]))
        rec.add(step, "dot", dot)
        optimizer.zero_grad()
        sum(losses).backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        sum(losses).backward()
        rec.add(step, "twice", all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), first)))
        loss = F.cross_entropy(heads[0](trunk(x)), labels)
        g = torch.autograd.grad(loss, shared, create_graph=True)
        hvp = torch.autograd.grad(g, shared, grad_outputs=[torch.ones_like(t) for t in g])
        for index, part in enumerate(hvp):
            rec.add(step, f"hvp{index}", part)
        rec.add(step, "loss", sum(losses))
        rec.module(step, model)
        rec.fixed_bytes(model, x, labels)
        optimizer.step()
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
