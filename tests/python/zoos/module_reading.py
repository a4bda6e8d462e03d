"""A module that reads values from wherever Python keeps them. Importable, as module_zoo.py is."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

FACTOR = 1.5
TABLE: dict[str, Any] = {"scale": [2.0, 3.0], "mode": "tanh"}
NAMES = {"tanh"}
BEHIND = {"shift": 0.375}


class Settings:
    """A class of the program's: values in itself, in objects, behind methods."""

    gain = 1.25

    def __init__(self) -> None:
        self.offset = 0.5
        self.nested = {"power": 2.0}
        self.unread = 0

    def power(self) -> float:
        """Reads an attribute that only this object knows of."""
        return float(self.nested["power"])


SETTINGS = Settings()


def _multiplied(amount: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * amount

    return multiply


times = _multiplied(0.75)


def shifted(x: torch.Tensor, by: list[float] = [0.125]) -> torch.Tensor:  # noqa: B006
    """Adds what its default has."""
    return x + by[0]


class Reading(nn.Module):
    """Every value below changes the answer."""

    weights = [0.5, 0.25]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.config = Settings()
        self.steps = [1.0]
        self.shown = types.MappingProxyType(BEHIND)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dense(x) * FACTOR + TABLE["scale"][1]
        y = y.tanh() if TABLE["mode"] in NAMES else y.sin()
        y = y * Settings.gain + SETTINGS.offset - self.config.offset * self.steps[0]
        y = y + self.shown["shift"]
        y = times(shifted(y.abs())).pow(SETTINGS.power()) * sum(self.weights)
        return y * float(os.environ.get("TEST_READING", "1"))
