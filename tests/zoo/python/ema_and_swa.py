"""Averages of weights: EMA by hand, AveragedModel, SWALR and update_bn, evaluation with the averaged weights swapped in."""
import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(36)
    body = [layer for _ in range(5) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *body, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    swa = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    batches = []
    for step in range(4):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        batches = [images[:8], images[8:]]
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    shadow[name].mul_(0.9).add_(value, alpha=0.1)
        swa.update_parameters(model)
        ema.update_parameters(model)
        scheduler.step()
        rec.add(step, "loss", loss)
        for name, value in shadow.items():
            rec.add(step, f"shadow.{name}", value)
        rec.module(step, swa, "swa")
        rec.module(step, ema, "ema")
        rec.fixed_bytes(model, optimizer, swa, ema, shadow, images, labels)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(shadow)
        with torch.no_grad():
            rec.add(step, "averaged", model.eval()(images).sum())
        model.load_state_dict(kept)
        model.train()
    update_bn(batches, swa)
    rec.module(step, swa, "final")
    rec.finish()


if __name__ == "__main__":
    main()
