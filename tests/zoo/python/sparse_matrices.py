"""Graph network: COO and CSR sparse times dense, sparse softmax, edge gathers, sparse tensors with gradients."""
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

warnings.filterwarnings("ignore", category=UserWarning)


def main():
    rec = Recorder(sys.argv)
    seed_everything(31)
    nodes, edges = 1024, 6000
    pairs = torch.unique(torch.randint(0, nodes, (2, edges)), dim=1)
    matrix = torch.sparse_coo_tensor(pairs, torch.rand(pairs.shape[1]), (nodes, nodes)).coalesce()
    compressed = matrix.to_sparse_csr()
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
    edge_weight = nn.Parameter(torch.rand(pairs.shape[1]))
    optimizer = torch.optim.Adam([*layers.parameters(), edge_weight], lr=1e-3)
    for step in range(4):
        x, labels = torch.randn(nodes, 64), torch.randint(0, 64, (nodes,))
        h = torch.relu(torch.sparse.mm(matrix, layers[0](x)))
        h = torch.relu(compressed @ layers[1](h))
        learned = torch.sparse_coo_tensor(pairs, edge_weight, (nodes, nodes))
        h = torch.tanh(torch.sparse.mm(learned, layers[2](h)))
        h = torch.sparse.addmm(layers[3](h), matrix, h, beta=0.5)
        soft = torch.sparse.softmax(matrix, dim=1)
        h = layers[4](torch.sparse.mm(soft, h)) + torch.sparse.sum(matrix, dim=1).to_dense()[:, None]
        half = (matrix * 0.5 + matrix.t()).coalesce()
        h = h + half.to_dense()[:, :64] * 0.1
        loss = F.cross_entropy(h, labels)
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "half", half)
        rec.add(step, "edges", edge_weight.grad)
        rec.module(step, layers)
        rec.fixed_bytes(layers, edge_weight, optimizer, x, labels, matrix, compressed, pairs)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, layers)
    rec.finish()


if __name__ == "__main__":
    main()
