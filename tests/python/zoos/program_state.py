"""Modules whose forwards read what the program set after it imported this file."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

OPTIONS = SimpleNamespace(scale=1.0)
FACTORS: list[float] = []
gain: float | None = None


class Registry(dict[str, Any]):
    """As transformers has one: filled by instances, read by their forwards."""

    def scale_of(self, module: nn.Module) -> float:
        found = self.get(type(module).__name__)
        return float(found["scale"]) if found else 0.0


REGISTRY = Registry()


class Registered(nn.Module):
    """Enters itself into a table, and caches a value on its class, when it is made."""

    cached = 0.0

    def __init__(self) -> None:
        super().__init__()
        REGISTRY["Registered"] = {"scale": 2.0}
        type(self).cached = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * REGISTRY.scale_of(self) + self.cached


class Current:
    """A value for as long as a call takes."""

    def __init__(self) -> None:
        self.value: float | None = None


CURRENT = Current()


class Restores(nn.Module):
    """Sets a value of an object that outlives the call, and puts back what was there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CURRENT.value = 2.0
        y = torch.relu(x) * CURRENT.value + 1
        CURRENT.value = None
        return y


class Leaves(nn.Module):
    """The same, and leaves another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2 + 1
        CURRENT.value = 1.0 if CURRENT.value is None else None
        return y


def factor() -> float:
    """Called by the forward: what it reads counts too."""
    return sum(FACTORS)


class Configured(nn.Module):
    """Reads options that the program sets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * OPTIONS.scale * factor() + (gain or 0.0)


LAYERS: dict[str, float] = {}


class Comprehends(nn.Module):
    """Reads a table that the program fills in a comprehension alone, and in a nested function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def bias() -> float:
            return BIASES["second"]

        scales = [LAYERS[name] for name in ("first", "second")]
        return torch.relu(x) * (sum(scales) + bias())


BIASES: dict[str, float] = {}


def configure(scale: float) -> None:
    """What a program does with its command line."""
    global gain
    OPTIONS.scale = scale
    FACTORS[:] = [scale, 1.0]
    gain = scale
    LAYERS.update(first=scale, second=1.0)
    BIASES["second"] = scale


MADE: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Registered, Restores, Configured, Comprehends, Leaves)
}
