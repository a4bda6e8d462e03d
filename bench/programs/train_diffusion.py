"""Trains a U-Net to take noise from images of discs, then draws some (DDIM)."""

from __future__ import annotations

import math

import loop
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    "tiny": {"width": 8, "image": 8, "batch": 2, "drawn": 2},
    "cpu": {"width": 32, "image": 32, "batch": 8, "drawn": 4},
    "cuda": {"width": 128, "image": 64, "batch": 32, "drawn": 16},
}
STEPS = {"tiny": 4, "cpu": 130, "cuda": 200}
NOISES = 1000


class Residual(nn.Module):
    """Two convolutions beside a shortcut; the time is added between them."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, out)
        self.conv_1 = nn.Conv2d(channels, out, 3, padding=1)
        self.conv_2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(functional.silu(self.norm_1(x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.short(x) + self.conv_2(functional.silu(self.norm_2(y)))


class Attention(nn.Module):
    """Of all places of an image with each other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.enter = nn.Conv2d(channels, 3 * channels, 1)
        self.leave = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.enter(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=2)
        y = functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.leave(y.transpose(1, 2).reshape(batch, channels, height, width))


class UNet(nn.Module):
    """Three resolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        sizes = (width, 2 * width, 2 * width)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before, kept = width, [width]
        for channels in sizes:
            self.down.append(Residual(before, channels, time))
            kept.append(channels)
            before = channels
        self.middle = nn.ModuleList((Residual(before, before, time), Attention(before)))
        for channels in reversed(sizes):
            self.up.append(Residual(before + kept.pop(), channels, time))
            before = channels
        self.norm = nn.GroupNorm(4, before)
        self.leave = nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        half = self.width // 2
        steps = torch.exp(-math.log(10_000) / half * torch.arange(half, device=x.device))
        angles = time[:, None] * steps
        known = self.time(torch.cat((angles.sin(), angles.cos()), dim=1))
        x = self.enter(x)
        kept = []
        for block in self.down:
            x = block(x, known)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle[1](self.middle[0](x, known))
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, kept.pop()), dim=1), known)
        return self.leave(functional.silu(self.norm(x)))


def discs(batch: int, image: int, device: torch.device) -> Tensor:
    """Coloured discs at any place, on black."""
    places = torch.linspace(-1, 1, image, device=device)
    centre = torch.rand(batch, 2, 1, 1, device=device) - 0.5
    radius = 0.2 + 0.4 * torch.rand(batch, 1, 1, device=device)
    distance = (places[None, :, None] - centre[:, 0]) ** 2
    distance = distance + (places[None, None, :] - centre[:, 1]) ** 2
    colour = torch.rand(batch, 3, 1, 1, device=device)
    return 2.0 * colour * (distance < radius**2)[:, None] - 1.0


@torch.no_grad()
def draw(model: UNet, share: Tensor, count: int, image: int) -> Tensor:
    """Images from noise, in ten steps."""
    x = torch.randn(count, 3, image, image, device=share.device)
    times = list(range(NOISES - 1, -1, -NOISES // 10))
    for index, time in enumerate(times):
        noise = model(x, torch.full((count,), float(time), device=x.device))
        found = ((x - (1 - share[time]).sqrt() * noise) / share[time].sqrt()).clamp(-1, 1)
        if index + 1 == len(times):
            return found
        after = share[times[index + 1]]
        x = after.sqrt() * found + (1 - after).sqrt() * noise
    return x


def main() -> None:
    """Trains, draws, prints."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size, device = program.size, program.device
    share = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, NOISES, device=device), dim=0)
    model = UNet(size.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for step in program.each_step():
        images = discs(size.batch, size.image, device)
        noise = torch.randn_like(images)
        time = torch.randint(NOISES, (size.batch,), device=device)
        left = share[time][:, None, None, None]
        with program.autocast():
            guess = model(left.sqrt() * images + (1 - left).sqrt() * noise, time.float())
            loss = functional.mse_loss(guess, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if program.says(step):
            loop.say(step, loss=loss)
    model.eval()
    for index, image in enumerate(draw(model, share, size.drawn, size.image)):
        loop.say(index, mean=image.mean(), spread=image.std())


if __name__ == "__main__":
    main()
