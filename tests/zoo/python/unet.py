"""U-Net with skip connections, BatchNorm, bilinear and transposed upsampling, Dice and cross-entropy losses."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

from zoo import Recorder, seed_everything


def double(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
                         nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.down3 = double(3, 12), double(12, 24), double(24, 48)
        self.bottom = double(48, 64)
        self.lift3, self.lift2 = nn.ConvTranspose2d(64, 48, 2, stride=2), nn.ConvTranspose2d(48, 24, 2, stride=2)
        self.up3, self.up2, self.up1 = double(96, 48), double(48, 24), double(36, 12)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.down3(F.max_pool2d(b, 2))
        d = self.bottom(F.max_pool2d(c, 2))
        x = self.up3(torch.cat([self.lift3(d), c], 1))
        x = self.up2(torch.cat([self.lift2(x), b], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up1(torch.cat([x, a], 1)))


def main():
    rec = Recorder(sys.argv)
    seed_everything(9)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        images, masks = torch.randn(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64))
        logits = model(images)
        soft = logits.softmax(1)
        wanted = F.one_hot(masks, 4).permute(0, 3, 1, 2).float()
        dice = 1 - (2 * (soft * wanted).sum((0, 2, 3)) / (soft + wanted).sum((0, 2, 3))).mean()
        loss = F.cross_entropy(logits, masks) + dice
        optimizer.zero_grad()
        loss.backward()
        rec.add(step, "loss", loss)
        rec.module(step, model)
        rec.fixed_bytes(model, optimizer, images, masks)
        optimizer.step()
        rec.optimizer(step, optimizer)
    rec.module(step, model)
    rec.finish()


if __name__ == "__main__":
    main()
