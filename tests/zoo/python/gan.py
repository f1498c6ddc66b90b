"""GAN: two networks, two optimizers, one fake batch used twice, one discriminator pass detached."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def main():
    rec = Recorder(sys.argv)
    seed_everything(10)
    generator = nn.Sequential(
        nn.Linear(32, 32 * 64), nn.Unflatten(1, (32, 8, 8)), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Dropout2d(0.2),
        nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(2048, 1))
    optim_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optim_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for step in range(4):
        real, noise = torch.randn(48, 3, 32, 32).tanh(), torch.randn(48, 32)
        fake = generator(noise)
        optim_d.zero_grad()
        score_real, score_fake = discriminator(real), discriminator(fake.detach())
        loss_d = (F.binary_cross_entropy_with_logits(score_real, torch.ones_like(score_real))
                  + F.binary_cross_entropy_with_logits(score_fake, torch.zeros_like(score_fake)))
        loss_d.backward()
        optim_d.step()
        optim_g.zero_grad()
        loss_g = F.softplus(-discriminator(fake)).mean()
        loss_g.backward()
        rec.add(step, "loss_d", loss_d)
        rec.add(step, "loss_g", loss_g)
        rec.module(step, generator, "generator")
        rec.module(step, discriminator, "discriminator")
        rec.fixed_bytes(generator, discriminator, optim_g, optim_d, real, noise)
        optim_g.step()
        rec.optimizer(step, optim_g)
        rec.optimizer(step, optim_d)
        rec.generators(step)
    rec.module(step, generator)
    rec.finish()


if __name__ == "__main__":
    main()
