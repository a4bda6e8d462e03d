"""What a value leads to, whatever has it: attributes, items, and what C code keeps."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Container, Iterator
from typing import Any

import torch

from eagercache.callables.code_values import (
    filled_cells,
    is_covered,
    is_of_program,
    is_python_class,
    plain_value,
)

_MAX_VALUES = 4096
_MAX_DEPTH = 12


def is_leaf(value: Any) -> bool:
    """A value without parts that may be held."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and is_covered(str(value.__module__))
    return plain_value(value) is not None


def is_found_unasked(item: Any) -> bool:
    """Whether a set finds this member without running code of the program."""
    if isinstance(item, (tuple, frozenset)) and not is_python_class(type(item)):
        return all(map(is_found_unasked, item))
    kind: Any = type(item)
    by_identity = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    return is_leaf(item) or by_identity


def held_parts(value: Any) -> Iterator[Any]:
    """What a value leads to in one step."""
    if isinstance(value, dict):
        for item in list(value.items()):
            yield from item
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for _, content in filled_cells(value):
            yield content
    else:
        yield from _referents(value)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's own attributes; None of one that has none."""
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def function_parts(value: types.FunctionType) -> tuple[Any, ...]:
    """What may be assigned to a function, in the order of nn_modules/places/values.cc."""
    return (
        *(value.__code__, value.__defaults__, value.__kwdefaults__),
        *(value.__name__, value.__qualname__, value.__doc__),
    )


def _referents(value: Any) -> Iterator[Any]:
    """Whatever else an object leads to: its attributes, and what C code keeps."""
    if isinstance(value, (type, types.ModuleType)):
        return
    if not isinstance(value, deque) and (
        is_of_program(value) or isinstance(value, torch.nn.Module)
    ):
        yield vars(value)
    for part in gc.get_referents(value):
        if not isinstance(part, (type, types.ModuleType)):
            yield part


class Holdable:
    """Whether a value may be held: neither the watched module nor a tensor is reached from it.

    But for ``own``, its tensors, and the modules ``below`` it, by identity, which its guard holds
    anyway. ``root``: the identity of the module. One of another tree without a tensor may be held.
    """

    def __init__(self, own: Container[int], below: Container[int], root: int) -> None:
        self._own = own
        self._below = below
        self._root = root
        self._known: dict[int, bool] = {}  # by identity
        self._kept: list[Any] = []  # so that no identity is used twice meanwhile

    def __call__(self, value: Any) -> bool:
        """Walks what the value leads to, once."""
        return self._look(value, 0)

    def _look(self, value: Any, depth: int) -> bool:
        if is_leaf(value):
            return True
        if isinstance(value, torch.Tensor):
            return id(value) in self._own
        if id(value) in self._below or id(value) == self._root:
            return id(value) != self._root
        known = self._known.get(id(value))
        if known is not None:
            return known
        if depth > _MAX_DEPTH or len(self._kept) > _MAX_VALUES:
            return False
        before = len(self._kept)
        self._kept.append(value)
        self._known[id(value)] = True  # for what leads back to it
        held = all(self._look(part, depth + 1) for part in held_parts(value))
        if not held:  # what was true of a part may have been so because of this one
            for one in self._kept[before:]:
                self._known.pop(id(one), None)
            self._known[id(value)] = False
        return held
