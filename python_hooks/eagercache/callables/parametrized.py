"""Modules with computed tensors (`torch.nn.utils.parametrize`), on their way to a worker.

torch gives such a module a class of its own, with a property for each of these tensors, and lets
nobody pickle it. Here it travels as what it was made of: its first class, its parts, and the names
of the properties. Whether the worker's class is the same is said by the module's identity, which
has the code of classes that are not found by their name.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from eagercache.callables.code_values import is_found_by_name

Reduced = tuple[Any, ...]


def reduced(value: Any) -> Reduced | None:
    """How pickle has to write ``value`` down (`__reduce__`); None for all but such modules."""
    kind = type(value)
    if (
        not isinstance(value, torch.nn.Module)
        or kind.__module__ != parametrize.__name__
        or is_found_by_name(kind)
        or not parametrize.is_parametrized(value)
    ):
        return None
    (first,) = kind.__bases__
    fill: Callable[[torch.nn.Module, Any], None] = _fill
    return _make, (first,), (vars(value).copy(), list(value.parametrizations)), None, None, fill


def _make(kind: Any) -> torch.nn.Module:
    made: torch.nn.Module = kind.__new__(kind)
    return made


def _fill(module: torch.nn.Module, state: tuple[dict[str, Any], list[str]]) -> None:
    held, names = state
    vars(module).update(held)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    # The first copy of such a module writes this to its class, which a guard would notice.
    copyreg._slotnames(type(module))  # type: ignore[attr-defined]
