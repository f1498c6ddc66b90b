"""Gradient penalty (WGAN-GP): the gradient with respect to the input is itself differentiated."""
import sys

import torch
from torch import nn

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(24)
    critic = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.Softplus(), nn.Conv2d(16, 32, 3, 2, 1), nn.Tanh(),
                           nn.GroupNorm(4, 32), nn.Flatten(), nn.Linear(2048, 64), nn.ELU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for step in range(4):
        real, fake = torch.randn(32, 3, 32, 32), torch.rand(32, 3, 32, 32)
        mix = torch.rand(32, 1, 1, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        grad, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (grad.flatten(1).norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "penalty", penalty)
        rec.module(step, critic)
        rec.fixed_bytes(critic, optimizer, real, fake)
        optimizer.step()
        rec.optimizer(step, optimizer)
        rec.generators(step)
    rec.module(step, critic)
    rec.finish()


if __name__ == "__main__":
    main()
