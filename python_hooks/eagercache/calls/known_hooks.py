"""Hooks of modules that a description of these has: what they do is part of the forward.

Those by which transformers collects states (capturing_hooks.py), those with which
`torch.nn.utils.weight_norm` and `spectral_norm` compute a weight before each forward, and those
that have an answer need gradients: TorchDynamo traces them with it. Of all other hooks nothing is
known: a module that has some is left to its parts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import importlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from eagercache.calls import capturing_hooks

# Hooks that a call of a module runs.
CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Those that a description may have.
DESCRIBED_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _norms() -> Iterator[type]:
    """The classes of these hooks, as far as this torch has them: they are said to go."""
    for name, kind in (("weight_norm", "WeightNorm"), ("spectral_norm", "SpectralNorm")):
        with contextlib.suppress(ImportError, AttributeError):
            yield getattr(importlib.import_module(f"torch.nn.utils.{name}"), kind)


_NORMS = tuple(_norms())


def is_known(hook: Any) -> bool:
    """Whether a description has what a hook around a forward does."""
    return type(hook) in _NORMS or capturing_hooks.is_capturing(hook) or asks_for_gradients(hook)


def ask_for_gradients(module: torch.nn.Module, given: Any, answer: Any) -> None:
    """What stands in the worker for a hook that does the same."""
    answer.requires_grad_(True)


def asks_for_gradients(hook: Any) -> bool:
    """Whether a hook does no more than have its module's answer need gradients.

    Transformers and PEFT put one on embeddings where a model's parts are checkpoints, and so do
    programs.
    """
    if type(hook) is not types.FunctionType or hook.__closure__ is not None:
        return False
    return _instructions(hook.__code__) == _instructions(ask_for_gradients.__code__)


@functools.cache
def _instructions(code: types.CodeType) -> tuple[Any, ...]:
    """What the code does, whatever its variables are called."""
    named = {*dis.hasconst, *dis.hasname}
    return code.co_argcount, *(
        (one.opname, one.argval if one.opcode in named else one.arg)
        for one in dis.get_instructions(code)
    )


def are_known(module: torch.nn.Module) -> bool:
    """Whether a module has hooks around its forward, and all are known."""
    found = list(_hooks_of(module))
    return bool(found) and all(map(is_known, found))


def collectors(module: torch.nn.Module) -> list[contextvars.ContextVar[Any]]:
    """The variables that have to be without a value for the known hooks of ``module``: one or none.

    What its hooks are has been asked of `are_known`.
    """
    collector = capturing_hooks.collector()
    collects = any(map(capturing_hooks.is_capturing, _hooks_of(module)))
    return [collector] if collects and collector is not None else []


def written_hooks(module: torch.nn.Module, write: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """What a description has of them; ``write`` describes a value. Raises what that does."""
    for table in DESCRIBED_HOOKS:
        hooks = getattr(module, table)
        if hooks:
            yield [table, [_row(hook, write) for hook in list(hooks.values())]]


def _row(hook: Any, write: Callable[[Any], Any]) -> Any:
    kind = type(hook)
    if asks_for_gradients(hook):
        return ask_for_gradients.__name__
    return [kind.__name__, write(dict(vars(hook)))] if kind in _NORMS else write(hook)


def reduced(hook: Any) -> str | tuple[Any, ...] | None:
    """How a known hook is made again in another process, as `pickle` wants it; None for another.

    Those of norms are objects as any other.
    """
    if asks_for_gradients(hook):
        return getattr, (sys.modules[__name__], ask_for_gradients.__name__)
    return capturing_hooks.reduced(hook)


def others(module: torch.nn.Module, described: Collection[str]) -> bool:
    """Whether a call of ``module`` runs hooks, but for those of tables that are ``described``."""
    return any(getattr(module, table) for table in CALL_HOOKS if table not in described)


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    for table in DESCRIBED_HOOKS:
        hooks: Mapping[int, Any] = getattr(module, table)
        yield from list(hooks.values())
