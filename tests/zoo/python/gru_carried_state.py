"""Truncated back-propagation through time: GRU and LSTMCell whose state is carried (detached) from step to step."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(8)
    embed, gru, cell, head = nn.Embedding(50, 48), nn.GRU(48, 64, num_layers=2), nn.LSTMCell(64, 64), nn.Linear(64, 50)
    model = nn.ModuleList([embed, gru, cell, head])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True)
    stream = torch.randint(0, 50, (5 * 40 + 1, 32))
    state = torch.zeros(2, 32, 64)
    hidden, memory = torch.zeros(32, 64), torch.zeros(32, 64)
    for step in range(5):
        inputs, targets = stream[step * 40:(step + 1) * 40], stream[step * 40 + 1:(step + 1) * 40 + 1]
        state = state.detach()
        hidden, memory = hidden.detach(), memory.detach()
        y, state = gru(embed(inputs), state)
        outputs = []
        for moment in y:
            hidden, memory = cell(moment, (hidden, memory))
            outputs.append(hidden)
        logits = head(torch.stack(outputs))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "state", state)
        rec.add(step, "memory", memory)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, stream)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
