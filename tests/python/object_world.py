"""Modules that are called with objects, and what becomes of those. Importable, as module_zoo.py.

`CASES` has for each a function that makes a module and its calls. Each call is made with objects of
its own, once by the forward alone and once with kernels; then both are compared: answers, and all
that the objects hold.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
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


class Reader(nn.Module):
    """One of the functions below, on something worth a kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function.__name__
        self.shared = Box(step=1.0)

    def forward(self, x: torch.Tensor, box: Any = None, **more: Any) -> Any:
        return getattr(self, self.function)(self.second(self.first(x).tanh() + 0.5), box, **more)

    def options(self, y: torch.Tensor, options: Any, **_: Any) -> Any:
        """Of a frozen dataclass; returns it, too."""
        value = y * options.value + options.mask
        return (
            value if options.box is None else value + options.box.value
        ) * options.count, options

    def forced(self, y: torch.Tensor, options: Any, **_: Any) -> torch.Tensor:
        """Sets what nobody may set."""
        object.__setattr__(options, "count", options.count + 1)
        return y * options.count

    def encoded(self, y: torch.Tensor, encoded: Any, **_: Any) -> Any:
        """Of an output of transformers, in all the ways that it has."""
        if isinstance(encoded, ModelOutput) and "states" in encoded:
            y = y + encoded.states[0] * len(encoded)
        y = y + encoded[0].sum(dim=1, keepdim=True) + encoded["last"].mean() * (encoded.count or 1)
        return Encoded(last=y, name=encoded.name)

    def hand_on(self, y: torch.Tensor, encoded: Any, **_: Any) -> Any:
        """Returns what its argument holds."""
        return Encoded(last=y + encoded.last.mean(), states=encoded.states), encoded.last

    def set_field(self, y: torch.Tensor, encoded: Any, **_: Any) -> torch.Tensor:
        """Changes an output that it is given."""
        encoded.last = y * 2.0
        return y + encoded["last"]

    def grow(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Two layers of a cache; returns it, too."""
        keys = [layer.update(y + index) for index, layer in enumerate(cache.layers)]
        total = torch.stack([key.sum(dim=1, keepdim=True) for key in keys]).sum(dim=0)
        return {"out": y * total.sigmoid(), "cache": cache, "length": None}

    def count(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """A number in an object that each call raises."""
        cache.layers[0].calls += 1
        return y * cache.layers[0].calls

    def count_on(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Another program from a number on, which is anything before and after."""
        layer = cache.layers[0]
        layer.calls += y.size(1)
        cache.layers[1].calls = 2 * layer.calls + cache.layers[1].calls
        return y * layer.calls if layer.calls < 9 else (y - layer.calls).relu()

    def at_least(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Changes a number only where it is small."""
        layer = cache.layers[0]
        layer.calls = max(layer.calls, 1)
        return (y * layer.calls).relu()

    def longest(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Changes a number only where a size is large."""
        box.value = max(box.value, y.size(1))
        return (y * 2.0).sum(dim=1).relu()

    def mark(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Says of a number whether it is large, without asking."""
        layer = cache.layers[0]
        layer.ready = layer.calls > 0
        return (y + layer.calls).relu()

    def slide(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Keeps the last keys, as a part of what it made of all of them, and counts them all."""
        total = torch.zeros_like(y)
        for layer in cache.layers:
            positions = torch.arange(layer.calls, layer.calls + y.size(1))
            keys = layer.update(y + positions[None, :, None] / 64)
            layer.keys, layer.calls = keys[:, -4:], layer.calls + y.size(1)
            total = total + keys.sum(dim=1, keepdim=True)
        return y * total.sigmoid()

    def mode(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Branches on plain values of an object."""
        y = y.relu() if cache.mode == "keep" else y.sigmoid()
        return (y * 2.0 if cache.flags[1] else y + 1.0) * (1.0 if cache.layers[0].ready else 3.0)

    def append(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Adds to a list in an object."""
        cache.layers.append(Layer(0))
        return y * len(cache.layers)

    def append_in_tuple(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Adds to a list that a tuple in an object holds."""
        box.lists[0].append(3.0)
        return (y * len(box.lists[0])).relu()

    def put_in_tuple(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Replaces what such a list holds."""
        box.lists[0][0] = y + 1.0
        return (y * box.lists[1][0]).relu()

    def append_beside(self, y: torch.Tensor, box: Any, seen: Any = None, **_: Any) -> Any:
        """Adds to a list that is an argument beside an object."""
        seen.append(1.0)
        return (y * box.value * len(seen)).relu()

    def put_beside(self, y: torch.Tensor, box: Any, seen: Any = None, **_: Any) -> Any:
        """Replaces what such a dict holds."""
        seen["y"] = y + 1.0
        return (y * box.value).relu()

    def write(self, y: torch.Tensor, cache: Any, **_: Any) -> Any:
        """Writes to a tensor in an object."""
        cache.layers[0].keys[:, :1].add_(y[:, :1])
        return y * 2.0 + cache.layers[0].keys.sum()

    def attribute(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Reads one value."""
        return (y * box.value).relu()

    def twice(self, y: torch.Tensor, box: Any, other: Any, **_: Any) -> Any:
        """Writes through one argument, and reads through the other."""
        box.value = y * 2.0
        return (other.value + 1.0).relu()

    def aliased(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Writes through the argument, and reads through the module."""
        box.step = box.step + 1.0
        return (y * self.shared.step).relu()

    def delete(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Takes an attribute away."""
        value = box.value
        del box.value
        return (y * value).relu()

    def lazily(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Gives an object attributes that it had not."""
        if not hasattr(box, "dtype"):
            box.dtype, box.device, box.first = y.dtype, y.device, y + 1.0
        return y * box.first.sum()

    def make_cache(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Makes a cache where it was given none, as language models do, and returns it."""
        cache = Cache(0) if box is None else box
        total = sum(layer.update(y + index).sum() for index, layer in enumerate(cache.layers))
        made = Made(y * total, [Layer, y.dtype, {0: 1, 1: (True, None)}])
        return {"out": y * total, "cache": cache, "made": [made, (made.y + 1.0).relu()]}

    def make_shared(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Returns an object in two places."""
        made = Made(y.relu() * 2.0)
        return y + 1.0, made, [made]

    def return_held(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Returns what the module holds."""
        return (y + 1.0).relu(), self.shared

    def return_part(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Returns an object that is new, with a list that outlives it."""
        return (y + 1.0).relu(), Made(y * 2.0, OUTLIVING)

    def return_doubled(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Returns an object that says another thing of an attribute than it holds."""
        return (y + 1.0).relu(), Doubled(y + 1.0)


Calls = list[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]


def tokens(count: int) -> torch.Tensor:
    """What the calls are given beside objects."""
    return torch.linspace(-1, 1, 8 * count).view(1, count, 8)


def _changed(change: Callable[[Cache], None]) -> Callable[[], Any]:
    def make() -> Any:
        cache = Cache(3)
        change(cache)
        return (tokens(1), cache), {}

    return make


def _counted(calls: int) -> Callable[[], Any]:
    return _changed(lambda cache: setattr(cache.layers[0], "calls", calls))


def _boxed_tokens(count: int) -> Callable[[], Any]:
    return lambda: ((tokens(count), Box(value=50)), {})


def _slid(calls: int) -> Callable[[], Any]:
    def change(cache: Cache) -> None:
        for layer in cache.layers:
            layer.keys, layer.calls = layer.update(tokens(2))[:, -4:], calls

    return _changed(change)


def _same_box() -> Any:
    box = Box(value=torch.ones(1, 2, 8))
    return (tokens(2), box), {"other": box}


def _boxes(*values: Any) -> Calls:
    return [lambda v=v: ((tokens(2), Box(value=v)), {}) for v in values]  # type: ignore[misc]


def _modes() -> Calls:
    return [
        _changed(lambda cache: None),
        _changed(lambda cache: setattr(cache, "mode", "drop")),
        _changed(lambda cache: cache.flags.update({1: True})),
        _changed(lambda cache: setattr(cache.layers[0], "ready", False)),
        _changed(lambda cache: setattr(cache, "more", 1.5)),
    ]


# Calls are made in turn, all of them three times; (module's function, calls, hits at least).
CASES: dict[str, tuple[Callable[..., Any], Calls, int]] = {
    "grow": (
        Reader.grow,
        [lambda n=n: ((tokens(1), Cache(n)), {}) for n in range(2, 12)],  # type: ignore[misc]
        12,
    ),
    "grow by keyword": (Reader.grow, [lambda: ((tokens(1),), {"box": Cache(5)})], 1),
    "start": (Reader.grow, [_changed(lambda c: setattr(c.layers[1], "keys", None))], 1),
    "count": (Reader.count, [lambda: ((tokens(2), Cache(3)), {})], 1),
    "count on": (Reader.count_on, [_counted(n) for n in range(16)], 40),
    "at least": (Reader.at_least, [_counted(n) for n in (12, 14, 3, 0, 1, 13)], 6),
    "longest": (Reader.longest, [_boxed_tokens(n) for n in (3, 5, 4, 60, 12, 70)], 6),
    "mark": (Reader.mark, [_counted(n) for n in (12, 14, 3, 0, 1, 13)], 6),
    "slide": (Reader.slide, [_slid(n) for n in range(3, 15)], 30),
    "below zero": (Reader.attribute, _boxes(-3, -2, -1), 3),
    "mode": (Reader.mode, _modes(), 5),
    "append": (Reader.append, [lambda: ((tokens(2), Cache(3)), {})], 0),
    "append in a tuple": (
        Reader.append_in_tuple,
        [lambda: ((tokens(2), Box(lists=([1.0], [2.0]))), {})],
        0,
    ),
    "put in a tuple": (
        Reader.put_in_tuple,
        [lambda: ((tokens(2), Box(lists=([1.0], [2.0]))), {})],
        1,
    ),
    "append beside it": (
        Reader.append_beside,
        [lambda: ((tokens(2), Box(value=2.0)), {"seen": [0.0]})],
        0,
    ),
    "put beside it": (
        Reader.put_beside,
        [lambda: ((tokens(2), Box(value=2.0)), {"seen": {"y": 0.0}})],
        0,
    ),
    "write": (Reader.write, [lambda: ((tokens(2), Cache(3)), {})], 1),
    "slots": (Reader.attribute, [lambda: ((tokens(2), Slotted()), {})], 0),
    "getattr": (Reader.attribute, [lambda: ((tokens(2), Guarded()), {})], 0),
    "other kinds of values": (
        Reader.attribute,
        _boxes(2.0, 3, True, torch.ones(8)),
        4,
    ),
    "a value that is no plain one": (
        Reader.attribute,
        [lambda: ((tokens(2), Box(value=2.0, more=NOTHING)), {})],
        0,
    ),
    "the same object twice": (
        Reader.twice,
        [
            lambda: ((tokens(2), Box(value=torch.ones(1, 2, 8))), {"other": Box(value=tokens(2))}),
            _same_box,
        ],
        1,
    ),
    "make a cache": (
        Reader.make_cache,
        [
            lambda: ((tokens(2),), {}),
            lambda: ((tokens(3), None), {}),
            lambda: ((tokens(1), Cache(3)), {}),
        ],
        3,
    ),
    "make what is shared": (Reader.make_shared, [lambda: ((tokens(2),), {})], 0),
    "return what the module holds": (Reader.return_held, [lambda: ((tokens(2),), {})], 0),
    "return what outlives the call": (Reader.return_part, [lambda: ((tokens(2),), {})], 0),
    "return what says another thing": (Reader.return_doubled, [lambda: ((tokens(2),), {})], 0),
    "frozen": (
        Reader.options,
        [
            lambda: ((tokens(2), Options(2.0, tokens(2))), {}),
            lambda: ((tokens(2), Options(3.0, tokens(2), 5)), {}),
            lambda: ((tokens(4), Options(3.0, tokens(4), 6, Box(value=1.5))), {}),
        ],
        5,
    ),
    "made of another value": (Reader.attribute, [lambda: ((tokens(2), Rounded(2.0)), {})], 0),
    "frozen and changed": (
        Reader.forced,
        [lambda: ((tokens(2), Options(2.0, tokens(2))), {})],
        0,
    ),
    "an encoder's output": (
        Reader.encoded,
        [
            lambda: ((tokens(2), Encoded(last=tokens(5), name="a")), {}),
            lambda: ((tokens(2), Encoded(last=tokens(5), states=(tokens(2),), count=4)), {}),
            lambda: ((tokens(2), Encoded(last=tokens(6), states=(tokens(2),), count=5)), {}),
        ],
        5,
    ),
    "what an encoder's output holds": (
        Reader.hand_on,
        [
            lambda: ((tokens(2), Encoded(last=tokens(5))), {}),
            lambda: ((tokens(2), Encoded(last=tokens(5), states=(tokens(1), tokens(2)))), {}),
        ],
        3,
    ),
    "an encoder's output is changed": (
        Reader.set_field,
        [lambda: ((tokens(2), Encoded(last=tokens(2))), {})],
        0,
    ),
    "delete": (Reader.delete, [lambda: ((tokens(2), Box(value=2.0)), {})], 0),
    "lazily": (
        Reader.lazily,
        [
            lambda: ((tokens(2), Box()), {}),
            lambda: ((tokens(2), Box(first=tokens(1), dtype=1)), {}),
        ],
        2,
    ),
}


def inside(value: Any, known: tuple[Any, ...] = ()) -> Any:
    """What a value holds, as data that can be compared; objects by their place in the call."""
    for index, one in enumerate(known):
        if value is one:
            return ("argument", index)
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.stride(), value.tolist())
    if isinstance(value, dict):
        return (type(value).__name__, [(key, inside(item, known)) for key, item in value.items()])
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, [inside(item, known) for item in value])
    if not isinstance(value, type) and isinstance(getattr(value, "__dict__", None), dict):
        return (type(value).__name__, inside(vars(value), known))
    return repr(value)


def is_close(one: Any, other: Any) -> bool:
    """Whether two results of `inside` are equal but for roundings."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-5 * (1.0 + abs(other))
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)
