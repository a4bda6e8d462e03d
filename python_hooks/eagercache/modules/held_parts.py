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
    is_python_class,
    plain_value,
)


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


def _referents(value: Any) -> Iterator[Any]:
    """Whatever else an object leads to: its attributes, and what C code keeps."""
    if isinstance(value, (type, types.ModuleType)):
        return
    if not isinstance(value, deque) and is_of_program(value):
        yield vars(value)
    for part in gc.get_referents(value):
        if not isinstance(part, (type, types.ModuleType)):
            yield part
