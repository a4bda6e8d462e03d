"""Classes and functions of the worlds of module_world.py. Importable, as it is."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class Options:
    """What `dataclasses.asdict` copies."""

    value: float = 2.0


class Tasks(enum.Flag):
    """Members of which one may be in several."""

    FIRST = 1
    SECOND = 2


class Gains(type(nn.Module)):  # type: ignore[misc]
    gain = 2.0


class Gained(nn.Module, metaclass=Gains):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * type(self).gain  # type: ignore[attr-defined, no-any-return]


def kind_of(value: float) -> Any:
    """A class like others of its name, but for what its method holds."""

    class Kind:
        def get(self) -> float:
            return value

    return Kind


KIND = kind_of(2.0)


def split(values: list[float]) -> float:
    """Catches an error of each line, and as `split_apart` of the second one alone."""
    try:
        first = values[0]
        return first + values[1]
    except IndexError:
        return 3.0


def split_apart(values: list[float]) -> float:
    """The same instructions as `split`."""
    first = values[0]
    try:
        return first + values[1]
    except IndexError:
        return 3.0
