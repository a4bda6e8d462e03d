"""What a value leads to, whatever has it: attributes, items, and what C code keeps."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from eagercache.callables.code_values import (
    filled_cells,
    is_covered,
    is_of_program,
    plain_value,
)


def is_leaf(value: Any) -> bool:
    """A value without parts that may be held."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and is_covered(str(value.__module__))
    return plain_value(value) is not None


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


def _referents(value: Any) -> Iterator[Any]:
    """Whatever else an object leads to: its attributes, and what C code keeps."""
    if isinstance(value, (type, types.ModuleType)):
        return
    if not isinstance(value, deque) and is_of_program(value):
        yield vars(value)
    for part in gc.get_referents(value):
        if not isinstance(part, (type, types.ModuleType)):
            yield part
