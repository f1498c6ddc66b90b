"""TreeLSTM over random trees: recursion that depends on data, thousands of tiny tensors."""
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class TreeLstm(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(vocabulary, width)
        self.leaf = nn.Linear(width, 3 * width)
        self.node = nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, 5)

    def forward(self, tree):
        if isinstance(tree, int):
            i, o, u = self.leaf(self.embed(torch.tensor([tree]))).chunk(3, -1)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c
        (lh, lc), (rh, rc) = self(tree[0]), self(tree[1])
        i, lf, rf, o, u = self.node(torch.cat([lh, rh], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + lf.sigmoid() * lc + rf.sigmoid() * rc
        return o.sigmoid() * c.tanh(), c


def random_tree(leaves):
    if leaves == 1:
        return random.randrange(100)
    left = random.randint(1, leaves - 1)
    return random_tree(left), random_tree(leaves - left)


def main():
    rec = Recorder(sys.argv)
    seed_everything(11)
    model = TreeLstm(100, 96)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(3):
        trees = [random_tree(random.randint(20, 40)) for _ in range(12)]
        labels = torch.randint(0, 5, (12,))
        logits = torch.cat([model.head(model(tree)[0]) for tree in trees])
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, labels)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
