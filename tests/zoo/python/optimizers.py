"""All of torch.optim on one small net each: plain loops, foreach, fused, differentiable-free options (maximize, amsgrad, ...)."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything

VARIANTS = [["loop"], ["foreach"], ["fused"], ["options"]]

CHOICES = {
    "loop": [(name, dict(foreach=False)) for name in
             ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")]
            + [("Adafactor", {}), ("LBFGS", dict(max_iter=3, lr=0.1))],
    "foreach": [(name, dict(foreach=True)) for name in
                ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adafactor")],
    "fused": [(name, dict(fused=True)) for name in ("Adagrad", "Adam", "AdamW", "SGD")]
             + [("Adam", dict(fused=True, amsgrad=True)), ("SGD", dict(fused=True, momentum=0.9, nesterov=True, weight_decay=1e-3))],
    "options": [("Adam", dict(amsgrad=True, maximize=True)), ("AdamW", dict(foreach=True, amsgrad=True, weight_decay=0.1)),
                ("SGD", dict(momentum=0.9, dampening=0.1, maximize=True)), ("SGD", dict(momentum=0.9, nesterov=True, foreach=True)),
                ("RMSprop", dict(momentum=0.5, centered=True, foreach=True)), ("NAdam", dict(decoupled_weight_decay=True, weight_decay=0.1)),
                ("RAdam", dict(decoupled_weight_decay=True, weight_decay=0.1, foreach=True)),
                ("Adagrad", dict(lr_decay=0.1, initial_accumulator_value=0.1)), ("Muon", {})],
}


def main():
    rec = Recorder(sys.argv)
    seed_everything(37)
    for name, options in CHOICES[rec.args[0]]:
        if not hasattr(torch.optim, name):
            continue
        net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64, bias=name != "Muon"), nn.Tanh(),
                                                                    nn.Linear(64, 64, bias=name != "Muon"), nn.GELU())))
        options = {"lr": 1e-3, **options}
        optimizer = getattr(torch.optim, name)(net.parameters(), **options)
        for step in range(3):
            x = torch.randn(1024, 64)

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), x)
                loss.backward()
                return loss

            if name == "LBFGS":
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            rec.add(step, f"{name}.loss", loss)
            rec.fixed_bytes(net, optimizer, x)
        rec.module(step, net, f"{name}{sorted(options)}")
        rec.optimizer(step, optimizer, name)
    rec.finish()


if __name__ == "__main__":
    main()
