"""Forward hooks that keep activations, hooks on gradients and modules, retain_grad, optimizer steps inside backward."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(55)
    model = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 96))
    kept, flowing = {}, {}

    def keep(name):
        def hook(module, inputs, output):
            kept[name] = output
            if name == "3":
                return output * 1.01
        return hook

    def watch(module, grad_in, grad_out):
        flowing["4"] = grad_out[0]
        return tuple(g if g is None else g * 0.9 for g in grad_in)

    for name, module in model.named_children():
        module.register_forward_hook(keep(name))
    model[4].register_full_backward_hook(watch)
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.01,))
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model[4:].parameters()}

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_now)
    outer = torch.optim.SGD(model[:4].parameters(), lr=0.05)
    for step in range(4):
        x = torch.randn(1024, 96)
        y = model(x)
        kept["1"].retain_grad()
        y.register_hook(lambda grad: flowing.__setitem__("y", grad.clone()))
        loss = F.mse_loss(y, x) + kept["5"].abs().mean() * 0.1
        outer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        for name in kept:
            rec.add(step, f"kept{name}", kept[name])
        for name in flowing:
            rec.add(step, f"flowing{name}", flowing[name])
        rec.add(step, "retained", kept["1"].grad)
        rec.module(step, model)
        rec.fixed_bytes(model, x, list(optimizers.values()))
        outer.step()
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
