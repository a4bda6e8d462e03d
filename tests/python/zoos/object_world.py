"""Modules that are called with objects, and what becomes of those. Importable, as module_zoo.py.

`CASES` has for each a function that makes a module and its calls. Each call is made with objects of
its own, once by the forward alone and once with kernels; then both are compared: answers, and all
that the objects hold.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from object_forwards import Reader
from object_kinds import (
    NOTHING,
    Box,
    Cache,
    Encoded,
    Fixed,
    Guarded,
    Level,
    Loaded,
    Loose,
    Mixed,
    Number,
    Odd,
    Options,
    Pair,
    Parts,
    Rich,
    Rounded,
    Sides,
    Slotted,
    State,
)

# What programs of tests begin with, which are told where this folder is (`here`).
PRELUDE = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, object_kinds, object_world
from object_forwards import Reader
from object_kinds import Box, Cache, Layer
from object_world import inside, is_close, parts, tokens
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

def hits(model):
    return sum(row.hits for part, row in manager.stats() if part is model)

"""

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


def _boxed(**held: Any) -> Callable[[], Any]:
    return lambda: ((tokens(2), Box(**held)), {})


def _holding() -> Any:
    pairs = [Pair(tokens(1)), Pair(tokens(2), 3.0)]
    parts = (1.0, tokens(1), [tokens(3)])
    return (tokens(2), Box(parts=parts, table={"a": [tokens(1)]}, pairs=pairs, first=tokens(4))), {}


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
    "slots": (Reader.attribute, [lambda: ((tokens(2), Slotted()), {})], 2),
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
    "the same object twice at first": (
        Reader.twice,
        [
            *(3 * [_same_box]),
            lambda: ((tokens(2), Box(value=torch.ones(1, 2, 8))), {"other": Box(value=tokens(2))}),
        ],
        2,
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
    "a named tuple": (
        Reader.named,
        [
            lambda: ((tokens(2), Pair(tokens(2))), {}),
            lambda: ((tokens(2), Pair(tokens(3), 3)), {}),
            lambda: ((tokens(2), Pair(tokens(3), 4)), {}),
            lambda: ((tokens(2),), {"box": Pair(tokens(3), torch.ones(1))}),
        ],
        7,
    ),
    "fields of a named tuple": (
        Reader.first_of_two,
        [lambda: ((tokens(2), Odd(tokens(2), tokens(2) + 1.0)), {})],
        2,
    ),
    "named tuples in containers": (
        Reader.sides,
        [
            lambda: ((tokens(2), Box(sides=(Sides(tokens(1), tokens(1)), Sides(2.0, 1.0)))), {}),
            lambda: ((tokens(2), Box(sides=[Sides(2.0, tokens(1), 4.0), Sides(2.0, 1.0)])), {}),
        ],
        4,
    ),
    "a list in a named tuple is changed": (
        Reader.put_in_sides,
        [lambda: ((tokens(2), Sides([1.0], 2.0)), {})],
        0,
    ),
    "a named tuple with a dictionary": (
        Reader.loose,
        [lambda: ((tokens(2), Loose(2.0, 1.0)), {})],
        0,
    ),
    "members of enums": (
        Reader.level,
        [
            _boxed(level=Level.LOW, number=Number.TWO, parts=Parts.FIRST),
            _boxed(level=Level.HIGH, number=Number.TWO, parts=Parts.FIRST | Parts.SECOND),
            _boxed(level=Level.HIGH, number=Number.FIVE, parts=Parts.SECOND),
        ],
        # Before Python 3.11 members of a flag together have no name: no kernel.
        6 if sys.version_info >= (3, 11) else 4,
    ),
    "another member for many tokens": (
        Reader.level_by_size,
        [
            lambda n=n: ((tokens(n), Box(level=Level.LOW)), {})  # type: ignore[misc]
            for n in (3, 5, 4, 60, 12, 70)
        ],
        6,
    ),
    "what members hold": (
        Reader.rich,
        [_boxed(level=Rich.ONE), _boxed(level=Rich.TWO)],
        4,
    ),
    "a member that can be changed": (Reader.attribute, [_boxed(value=2.0, level=Loaded.LIST)], 0),
    "slots of a dataclass": (
        Reader.state,
        [
            lambda: ((tokens(1), State(tokens(3))), {}),
            lambda: ((tokens(1), State(tokens(4), 3)), {}),
            lambda: ((tokens(1), State(tokens(5), 4, Level.HIGH)), {}),
        ],
        6,
    ),
    "slots that nobody sets": (
        Reader.attribute,
        [lambda: ((tokens(2), Fixed(2.0, tokens(2))), {})],
        2,
    ),
    "a slot and a dictionary": (Reader.attribute, [lambda: ((tokens(2), Mixed()), {})], 0),
    "what is put into an object": (Reader.put, [_boxed(value=2.0)], 2),
    "elements of what an object holds": (Reader.held, [_holding], 2),
    "a dataclass is replaced": (
        Reader.replaced,
        [
            lambda: ((tokens(2), Options(2.0, tokens(2))), {}),
            lambda: ((tokens(2), Options(3.0, tokens(2), 5)), {}),
        ],
        2,
    ),
    "a dataclass as a dict": (
        Reader.as_dict,
        [lambda: ((tokens(2), Options(2.0, tokens(2))), {})],
        0,
    ),
    "the fields of a dataclass": (
        Reader.with_fields,
        [lambda: ((tokens(2), Options(2.0, tokens(2))), {})],
        2,
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


def parts(value: Any, place: str = "") -> Iterator[tuple[Any, str]]:
    """What can be told apart inside of a call's arguments, and where it is."""
    if isinstance(value, (torch.Tensor, list, dict, tuple)) or held_by(value) is not None:
        yield value, place
    held = held_by(value)
    if held is None and isinstance(value, dict):
        held = value
    if held is None and isinstance(value, (tuple, list)):
        held = dict(enumerate(value))
    for name, part in (held or {}).items():
        yield from parts(part, f"{place}/{name}")


def held_by(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, in a dictionary or in slots; None for anything else."""
    if isinstance(value, (type, torch.Tensor, enum.Enum, tuple)):
        return None
    if isinstance(getattr(value, "__dict__", None), dict):
        return dict(vars(value))
    names = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name) for name in names} if names else None


def inside(value: Any, known: Any = ()) -> Any:
    """What a value holds, as data that can be compared; what is ``known`` (`parts`) by its place.

    So is what was met before.
    """
    return _inside(value, list(known), {id(part): place for part, place in known})


def _inside(value: Any, kept: list[Any], places: dict[int, str]) -> Any:
    if id(value) in places:
        return ("known", places[id(value)])
    if isinstance(value, torch.Tensor):
        places[id(value)] = f"met {len(places)}"
        kept.append(value)
        return ("tensor", str(value.dtype), tuple(value.shape), value.stride(), value.tolist())
    name, held = type(value).__qualname__, held_by(value)
    if isinstance(value, dict):
        return (name, [(key, _inside(item, kept, places)) for key, item in value.items()])
    if isinstance(value, (tuple, list)):
        return (name, [_inside(item, kept, places) for item in value])
    if held is not None:
        return (name, _inside(held, kept, places))
    return (name, repr(value))


def is_close(one: Any, other: Any) -> bool:
    """Whether two results of `inside` are equal but for roundings."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-5 * (1.0 + abs(other))
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)
