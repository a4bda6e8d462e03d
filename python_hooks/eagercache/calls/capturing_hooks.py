"""The hooks by which transformers collects hidden states and attentions of a model's parts.

A model that is asked for them puts a hook on each of these parts, at its first such call, and
leaves it there. The hook adds what its part answers to a dictionary in a variable of the context,
which the model sets for the time of its forward; while that is None, or empty, it does nothing. So
a whole model with these hooks is its forward's code, hooks included, and its call has a kernel as
another one's has. A part alone has none while a model around it collects.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import types
from typing import Any

import torch

_NAME = "transformers.utils.output_capturing"
_INSTALL = "install_output_capuring_hook"
_COLLECTOR = "_active_collector"


def collector() -> contextvars.ContextVar[Any] | None:
    """The variable that these hooks read; None where transformers has none."""
    found = getattr(getattr(sys.modules.get(_NAME), _COLLECTOR, None), "context_var", None)
    return found if type(found) is contextvars.ContextVar else None


def is_capturing(hook: Any) -> bool:
    """Whether ``hook`` is one of these, of a transformers that this knows."""
    return _arguments_of(hook) is not None


def reduced(hook: Any) -> tuple[Any, ...] | None:
    """How one is made again in another process, as `pickle` wants it; None for another object."""
    arguments = _arguments_of(hook)
    return None if arguments is None else (_make, (arguments,))


def _make(arguments: dict[str, Any]) -> Any:
    from transformers.utils import output_capturing

    module = torch.nn.Module()
    getattr(output_capturing, _INSTALL)(module, **arguments)
    (hook,) = module._forward_hooks.values()
    return hook


def _arguments_of(hook: Any) -> dict[str, Any] | None:
    """What a hook was installed with, by name."""
    if type(hook) is not types.FunctionType or hook.__module__ != _NAME or collector() is None:
        return None
    install = getattr(sys.modules[_NAME], _INSTALL, None)
    if type(install) is not types.FunctionType or hook.__code__ not in install.__code__.co_consts:
        return None
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    names = _parameters(install)
    if not names <= cells.keys():
        return None
    return {name: cells[name].cell_contents for name in names}


@functools.cache
def _parameters(install: types.FunctionType) -> frozenset[str]:
    return frozenset(inspect.signature(install).parameters) - {"module"}
