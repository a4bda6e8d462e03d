"""Small modules for tests/python/test_modules.py. Importable, so that other processes know them."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual block with a parameter, a buffer, a submodule and a plain attribute."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.full((width,), 0.25))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.up(self.norm(x))) * 1.5 + 0.5
        return x + self.scale * torch.tanh(self.down(hidden)) + self.shift


class Words(nn.Module):
    """An embedding and something to fuse after it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = self.table(ids) * self.weight
        return rows.sin() + 1, {"squares": rows * rows}


class Prints(nn.Module):
    """Prints on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("called")
        return (x * self.weight).sin() + x


class Draws(nn.Module):
    """Draws random numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + torch.rand_like(x)


class Remembers(nn.Module):
    """Keeps a list of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.sums: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums.append(len(self.sums))
        return (x * self.weight).sin() + x


class CountsInBuffer(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sin() + x.cos() * self.calls


class ReturnsInput(nn.Module):
    """Hands its argument back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)


class Chatty(nn.Module):
    """A model that cannot be one kernel, around blocks that can."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        return self.second(self.first(x))


class TakesObject(nn.Module):
    """Takes an object that is neither a tensor nor a plain value, as a cache is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor, seen: object) -> torch.Tensor:
        return self.inner(x) + 1


def make(name: str) -> nn.Module:
    """An instance with reproducible values, in eval mode."""
    torch.manual_seed(1)
    return {
        kind.__name__: kind
        for kind in (
            Block,
            Words,
            Prints,
            Draws,
            Remembers,
            CountsInBuffer,
            ReturnsInput,
            Chatty,
            TakesObject,
        )
    }[name]().eval()


def example(name: str) -> torch.Tensor:
    """An argument for it."""
    generator = torch.Generator().manual_seed(2)
    if name == "Words":
        return torch.randint(0, 10, (4, 6), generator=generator)
    width = 48 if name in ("Block", "Chatty") else 8
    return torch.randn(4, width, generator=generator)
