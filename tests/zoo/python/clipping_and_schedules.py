"""Gradient clipping by norm and value, named parameter groups, warm-up and cosine schedules, gradient noise."""
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(39)
    model = nn.Sequential(nn.Linear(64, 96), *(layer for _ in range(5) for layer in (nn.LayerNorm(96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.SiLU())),
                          nn.Linear(96, 16))
    decay = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    plain = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 1e-2}], lr=1e-3)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(5):
        x, labels = torch.randn(768, 64), torch.randint(0, 16, (768,))
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)
        rec.add(step, "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=step % 2 == 0))
        rec.add(step, "norm1", nn.utils.get_total_norm([p.grad for p in model.parameters()], 1.0))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, x, labels)
        optimizer.step()
        schedule.step()
        plateau.step(loss.item())
        rec.add(step, "rates", schedule.get_last_lr())
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
