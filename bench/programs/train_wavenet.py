"""Trains dilated causal convolutions to foretell sound, in 256 steps of loudness."""

from __future__ import annotations

import math

import loop
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    "tiny": {"width": 8, "layers": 3, "stacks": 1, "length": 64, "batch": 1},
    "cpu": {"width": 32, "layers": 6, "stacks": 2, "length": 1024, "batch": 4},
    "cuda": {"width": 128, "layers": 10, "stacks": 3, "length": 8192, "batch": 8},
}
STEPS = {"tiny": 4, "cpu": 200, "cuda": 200}
LEVELS = 256


class Gated(nn.Module):
    """A convolution over the past, with a gate; gives what goes on and what is kept."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.past = dilation
        self.signal = nn.Conv1d(width, width, 2, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 2, dilation=dilation)
        self.onward, self.kept = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        padded = functional.pad(x, (self.past, 0))
        y = torch.tanh(self.signal(padded)) * torch.sigmoid(self.gate(padded))
        return x + self.onward(y), self.kept(y)


class WaveNet(nn.Module):
    """Stacks of layers whose reach doubles."""

    def __init__(self, width: int, layers: int, stacks: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(
            Gated(width, 2**layer) for _ in range(stacks) for layer in range(layers)
        )
        self.leave = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, LEVELS, 1)
        )

    def forward(self, wave: Tensor) -> Tensor:
        x = self.enter(wave)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x, kept = layer(x)
            total = total + kept
        return self.leave(total)


def sound(batch: int, length: int, device: torch.device) -> Tensor:
    """Chords of three tones with a little noise, within -1 and 1."""
    time = torch.arange(length + 1, device=device) / 16_000
    pitch = 110.0 * 2 ** (torch.randint(36, (batch, 3, 1), device=device) / 12)
    phase = 2 * math.pi * torch.rand(batch, 3, 1, device=device)
    tones = torch.sin(2 * math.pi * pitch * time + phase).mean(dim=1, keepdim=True)
    return (0.9 * tones + 0.02 * torch.randn_like(tones)).clamp(-1, 1)


def levels(wave: Tensor) -> Tensor:
    """The mu-law's steps."""
    bent = wave.sign() * torch.log1p(255.0 * wave.abs()) / math.log(256.0)
    return ((bent + 1.0) / 2.0 * (LEVELS - 1) + 0.5).long()


def main() -> None:
    """Trains and prints."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size, device = program.size, program.device
    model = WaveNet(size.width, size.layers, size.stacks).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, program.steps // 4), gamma=0.5)
    for step in program.each_step():
        wave = sound(size.batch, size.length, device)
        with program.autocast():
            logits = model(wave[..., :-1])
            loss = functional.cross_entropy(logits, levels(wave)[:, 0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if program.says(step):
            right = (logits.argmax(1) == levels(wave)[:, 0, 1:]).float().mean()
            loop.say(step, loss=loss, right=right)


if __name__ == "__main__":
    main()
