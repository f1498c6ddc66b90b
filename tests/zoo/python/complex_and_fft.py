"""Complex parameters and activations, FFTs of every kind, a spectral convolution, STFT, conjugate views."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


class Spectral(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        low = torch.einsum("bim,iom->bom", spectrum[..., :self.modes], self.weight)
        full = torch.zeros_like(spectrum)
        full[..., :self.modes] = low
        return F.gelu(torch.fft.irfft(full, n=x.shape[-1]) + self.skip(x))


def main():
    rec = Recorder(sys.argv)
    seed_everything(34)
    lift, blocks, head = nn.Conv1d(1, 16, 1), nn.ModuleList(Spectral(16, 24) for _ in range(3)), nn.Conv1d(16, 1, 1)
    mix = nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat) / 4)
    model = nn.ModuleList([lift, blocks, head])
    optimizer = torch.optim.Adam([*model.parameters(), mix], lr=1e-3)
    for step in range(4):
        x, target = torch.randn(32, 1, 256), torch.randn(32, 1, 256)
        h = lift(x)
        for block in blocks:
            h = block(h)
        c = torch.complex(h[:, :, ::2].contiguous(), h[:, :, 1::2].contiguous())
        c = torch.einsum("oi,bit->bot", mix, c)
        c = torch.fft.ifft(torch.fft.fftshift(torch.fft.fft(c), dim=-1)) * c.conj()
        c = c / (1 + c.abs()) + torch.polar(c.abs() * 0.01, c.angle()) + c.resolve_conj() * 0.1
        h = h + torch.cat([c.real, c.imag], -1) + torch.fft.fft2(h).abs().log1p() * 0.01
        waves = torch.stft(h[:, 0], 64, 16, window=torch.hann_window(64), return_complex=True)
        loss = F.mse_loss(head(h), target) + torch.view_as_real(waves).square().mean() * 1e-3
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.add(step, "mix", mix.grad)
        rec.module(step, model)
        rec.fixed_bytes(model, mix, optimizer, x, target)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
