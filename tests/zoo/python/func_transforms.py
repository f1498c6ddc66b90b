"""torch.func: per-sample gradients by vmap of grad, jvp, jacrev, a Hessian, random ops under vmap, an ensemble."""
import sys

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(44)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    members = [nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8)) for _ in range(4)]
    params = {k: v.detach().clone() for k, v in model.named_parameters()}

    def loss_of(params, x, label):
        return F.cross_entropy(functional_call(model, params, (x[None],)), label[None])

    for step in range(3):
        x, labels = torch.randn(128, 32), torch.randint(0, 8, (128,))
        per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        scale = (1.0 / norms.clamp(min=1e-6)).clamp(max=1.0)
        mean = {k: torch.einsum("n,n...->...", scale, g) / 128 for k, g in per_sample.items()}
        out, tangent = jvp(lambda p: functional_call(model, p, (x,)).square().mean(), (params,), (mean,))
        value, pull = vjp(lambda t: functional_call(model, params, (t,)), x)
        pulled, = pull(torch.ones_like(value))
        jacobian = vmap(jacrev(lambda t: functional_call(model, params, (t[None],))[0]))(x[:32])
        second = hessian(lambda b: functional_call(model, {**params, "4.bias": b}, (x,)).logsumexp(-1).mean())(params["4.bias"])
        noisy = vmap(lambda t: t + torch.randn_like(t) + F.dropout(t, 0.5), randomness="different")(x)
        same = vmap(lambda t: t * torch.rand(32), randomness="same")(x)
        stacked, buffers = stack_module_state(members)
        votes = vmap(lambda p, b, t: functional_call(members[0], (p, b), (t,)), in_dims=(0, 0, None))(stacked, buffers, x)
        votes.square().mean().backward()
        params = {k: (p - 0.5 * mean[k]).detach() for k, p in params.items()}
        for name, value in dict(norms=norms, out=out, tangent=tangent, pulled=pulled, jacobian=jacobian, second=second,
                                noisy=noisy, same=same, votes=votes).items():
            rec.add(step, name, value)
        for key, value in params.items():
            rec.add(step, key, value)
        for key, value in stacked.items():
            rec.add(step, f"member.{key}", value.grad)
        rec.generators(step)
        rec.fixed_bytes(model, params, members, stacked, x, labels)
    rec.finish()


if __name__ == "__main__":
    main()
