"""What a module's forward does with objects, for object_world.py. Importable, as that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from object_kinds import (
    OUTLIVING,
    Box,
    Cache,
    Doubled,
    Encoded,
    Layer,
    Level,
    Made,
    Number,
    Pair,
    Parts,
    Sides,
    State,
)
from torch import nn
from transformers.utils.generic import ModelOutput


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

    def named(self, y: torch.Tensor, pair: Any, **_: Any) -> Any:
        """Of a named tuple; returns it, a part of it, and others."""
        hidden, scale = pair
        y = y * scale + hidden.mean() + pair.scaled().sum() + pair[0].sum()
        return Pair(y, scale), {"pair": pair, "hidden": pair.hidden}, [Sides(y + 1.0, None)]

    def first_of_two(self, y: torch.Tensor, pair: Any, **_: Any) -> torch.Tensor:
        """Tells the fields of a named tuple from each other."""
        return (y * pair.first + 3.0 * pair.second).relu()

    def sides(self, y: torch.Tensor, box: Any, **_: Any) -> torch.Tensor:
        """Of named tuples in containers."""
        left, right, more = box.sides[0]
        total = left * 2.0 + right * (1.0 if more is None else more)
        return (y * total.sum() + box.sides[1].left * len(box.sides)).relu()

    def put_in_sides(self, y: torch.Tensor, sides: Any, **_: Any) -> torch.Tensor:
        """Changes a list that a named tuple holds."""
        sides.left[0] = y + 1.0
        return (y * 2.0).relu()

    def loose(self, y: torch.Tensor, pair: Any, **_: Any) -> torch.Tensor:
        """Of a named tuple that holds more."""
        return (y * pair.left + pair.right).relu()

    def level(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Branches on members of enums; sets one, and returns one."""
        y = y.relu() if box.level is Level.LOW else y.sigmoid()
        if box.number == Number.TWO:
            y = y * int(box.number)
        if box.parts & Parts.SECOND:
            y = y + 1.0
        box.level = Level.HIGH
        return y * box.number.value, {"level": Level.HIGH}

    def level_by_size(self, y: torch.Tensor, box: Any, **_: Any) -> torch.Tensor:
        """Sets another member for many tokens."""
        if y.size(1) > 20:
            box.level = Level.HIGH
        return (y * 2.0).sum(dim=1).relu()

    def rich(self, y: torch.Tensor, box: Any, **_: Any) -> torch.Tensor:
        """Reads what members hold beside their value."""
        return (y * box.level.factor + box.level.number).relu()

    def state(self, y: torch.Tensor, state: Any, **_: Any) -> Any:
        """Keys in slots that grow; returns what holds them, and another one."""
        state.keys = torch.cat([state.keys, y], dim=1)
        state.calls += 1
        level, state.level = state.level, Level.HIGH
        total = state.keys.sum(dim=1, keepdim=True)
        y = y * total.sigmoid() * (1.0 if level is Level.LOW else 2.0)
        return y, state, State(y + 1.0, 3)

    def table(self, y: torch.Tensor, box: Any, **_: Any) -> torch.Tensor:
        """Reads a table in an object's class."""
        return (y * box.TABLE["a"] + box.value).relu()

    def put(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Returns the very tensor that it puts into an object."""
        box.value = y * 2.0
        return y.relu() + 1.0, [box.value]

    def held(self, y: torch.Tensor, box: Any, **_: Any) -> Any:
        """Returns elements of what an object holds."""
        last = box.pairs[-1]
        first, box.first = box.first, y + 1.0
        return (y * 2.0).relu(), box.parts[1], box.table["a"], last, last.hidden, first, box.parts

    def replaced(self, y: torch.Tensor, options: Any, **_: Any) -> Any:
        """Makes another one of a frozen dataclass."""
        other = dataclasses.replace(options, value=options.value + 1.0)
        return (y * other.value + other.mask).relu(), other

    def as_dict(self, y: torch.Tensor, options: Any, **_: Any) -> Any:
        """Reads a dataclass as a dict."""
        held = dataclasses.asdict(options)
        return (y * held["value"]).relu() * held["count"]

    def with_fields(self, y: torch.Tensor, options: Any, **_: Any) -> Any:
        """Goes through the fields of a dataclass."""
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            y = y if value is None else y * value
        return y.relu()
