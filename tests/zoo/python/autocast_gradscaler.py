"""bfloat16 autocast with GradScaler and gradient accumulation; one step overflows on purpose and is skipped."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(20)
    body = [layer for _ in range(5) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU())]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *body, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * 64, 32),
                          nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(images)
                loss = F.cross_entropy(logits, labels) / 2
                with torch.autocast("cpu", enabled=False):
                    loss = loss + logits.float().square().mean() * 1e-3
            if step == 1 and part == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            rec.add(step, "loss", loss)
            rec.add(step, "logits", logits)
        rec.fixed_bytes(model, optimizer, images, labels)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rec.add(step, "norm", norm)
        rec.module(step, model)
        scaler.step(optimizer)
        scaler.update()
        rec.add(step, "scale", scaler.get_scale())
        rec.add(step, "scaler", sorted(scaler.state_dict().items()))
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
