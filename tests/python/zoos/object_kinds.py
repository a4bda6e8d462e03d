"""Classes of objects that modules are called with, for object_world.py. Importable, as that."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from transformers.utils.generic import ModelOutput

NOTHING = object()


class Layer(abc.ABC):  # noqa: B024
    """Keys of one layer, which grow."""

    scale = 1.0

    def __init__(self, length: int) -> None:
        self.keys: torch.Tensor | None = torch.linspace(-1, 1, 8 * length).view(1, length, 8)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.ready = length > 0
        self.calls = 0

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        """All keys, with those that are new."""
        self.keys = keys * 1.0 if self.keys is None else torch.cat([self.keys, keys], dim=1)
        return self.keys * self.scale


class Cache:
    """What transformers' caches are like."""

    def __init__(self, length: int, layers: int = 2) -> None:
        self.layers = [Layer(length) for _ in range(layers)]
        self.kind = Layer
        self.flags = {0: True, 1: False}
        self.mode = "keep"


class Slotted:
    """Has a value where none can be watched."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


class Guarded:
    """Runs code whenever an attribute is asked for that it has not."""

    def __init__(self) -> None:
        self.value = 2.0

    def __getattr__(self, name: str) -> float:
        return float(len(name))


class Made:
    """What forwards make."""

    def __init__(self, y: torch.Tensor, more: Any = None) -> None:
        self.y, self.more = y, more


class Doubled:
    """Answers for its attributes itself."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return found * 2.0 if name == "y" else found


class Tabled:
    """Has a table in its class."""

    TABLE = {"a": 2.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.value = 1.0


OUTLIVING = [1.0, 2.0]


class Box:
    """Anything."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@dataclasses.dataclass(frozen=True)
class Options:
    """Nobody sets its attributes."""

    value: float
    mask: torch.Tensor
    count: int = 3
    box: Any = None


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Holds another thing than it is given."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", self.value + 1.0)


@dataclasses.dataclass
class Encoded(ModelOutput):
    """What an encoder of transformers returns."""

    last: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None
    name: str | None = None
    count: int | None = None


class Pair(NamedTuple):
    """What a layer may be given and may return."""

    hidden: torch.Tensor
    scale: Any = 2.0

    def scaled(self) -> torch.Tensor:
        """Both."""
        return self.hidden * self.scale


Sides = collections.namedtuple("Sides", "left right more", defaults=(None,))


class Loose(collections.namedtuple("Loose", "left right")):
    """A named tuple that has a dictionary besides."""


class Odd(NamedTuple):
    """Another order than one would think: says that of itself in one place alone."""

    first: torch.Tensor
    second: torch.Tensor


class Level(enum.Enum):
    """What a forward asks for."""

    LOW = "low"
    HIGH = "high"


class Number(enum.IntEnum):
    """Members that are integers."""

    TWO = 2
    FIVE = 5


class Parts(enum.Flag):
    """Members that can be combined."""

    FIRST = enum.auto()
    SECOND = enum.auto()


class Rich(enum.Enum):
    """Members that hold more than their value."""

    ONE = (1, 2.0)
    TWO = (2, 3.0)

    def __init__(self, number: int, factor: float) -> None:
        self.number, self.factor = number, factor


class Loaded(enum.Enum):
    """A member with what can be changed."""

    LIST = [1.0, 2.0]  # noqa: RUF012


@dataclasses.dataclass(slots=True)
class State:
    """Keys that grow, in slots."""

    keys: torch.Tensor
    calls: int = 0
    level: Level = Level.LOW
    more: Any = None


@dataclasses.dataclass(slots=True, frozen=True)
class Fixed:
    """Nobody sets its slots."""

    value: float
    mask: torch.Tensor


class Mixed(Slotted):
    """Has a slot and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 1.0
