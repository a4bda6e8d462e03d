"""What stands in torch.nn.Module's place of ``__call__``, ``__setattr__`` and ``__delattr__``."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_NAMES = ("__call__", "__setattr__", "__delattr__")

_originals: dict[str, Any] = {}
_own: dict[str, Any] = {}


def install_hooks(core: Any) -> None:
    """Puts ours around the originals, once; they stay for the process's life.

    While modules are not active they cost a function call and do nothing. They are Python functions
    so that torch.compile traces through them, to the originals.
    """
    if _originals:
        return
    kind = torch.nn.Module
    _originals.update({name: getattr(kind, name) for name in _NAMES})
    core.set_parameter_type(torch.nn.Parameter)
    core.set_global_hooks([getattr(torch_module, name) for name in _GLOBAL_HOOKS])
    original_call = _originals["__call__"]
    answer = core.module_call(original_call)

    @functools.wraps(original_call)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original_call(self, *args, **kwargs)
        return answer(self, *args, **kwargs)

    set_attribute = _noticed(_originals["__setattr__"], core.module_changed)
    delete_attribute = _noticed(_originals["__delattr__"], core.module_changed)
    _own.update(zip(_NAMES, (call, set_attribute, delete_attribute), strict=True))
    for name, own in _own.items():
        setattr(kind, name, own)


def _noticed(original: Any, note: Any) -> Any:
    @functools.wraps(original)
    def change(self: torch.nn.Module, name: str, *value: Any) -> None:
        if is_dynamo_compiling():
            original(self, name, *value)
            return
        same = len(value) == 1 and _is_already(_current(self, name), value[0])
        original(self, name, *value)
        if not same:
            note(self)

    return change


def as_torch_made(value: Any) -> Any:
    """The function of torch.nn.Module that ``value`` stands for; ``value`` where it is not ours.

    Nor torch.compile's, which puts wrappers around two of them once a program has used it.
    """
    for name, own in _own.items():
        if value is own:
            return _originals[name]
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    if guard is not None and getattr(value, "__globals__", None) is vars(guard):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return next((found for found in cells if isinstance(found, types.FunctionType)), value)
    return value


_MISSING = object()
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device))


def _current(module: torch.nn.Module, name: str) -> Any:
    attributes = vars(module)
    for group in (attributes, attributes.get("_parameters"), attributes.get("_buffers")):
        # What torch.jit scripts has tables of its own kind in their place.
        value = group.get(name, _MISSING) if isinstance(group, dict) else _MISSING
        if value is not _MISSING:
            return value
    return _MISSING


def _is_already(held: Any, value: Any) -> bool:
    """Whether an assignment changes nothing: some forwards assign what is there at each call.

    `self.count += 1` on a buffer assigns its own tensor, `self.window = min(...)` an equal number.
    Of anything that can be changed itself, nobody knows what it was when it was looked at.
    """
    if held is value and isinstance(value, torch.Tensor):
        return True
    if type(held) is not type(value) or type(value) not in _PLAIN:
        return False
    # 0.0 is not -0.0, and NaN is not itself.
    return bool(repr(held) == repr(value)) if type(value) is float else bool(held == value)


@contextlib.contextmanager
def originals() -> Iterator[None]:
    """torch.nn.Module as torch made it, for the block. For a process with one thread."""
    ours = {name: getattr(torch.nn.Module, name) for name in _originals}
    try:
        for name, original in _originals.items():
            setattr(torch.nn.Module, name, original)
        yield
    finally:
        for name, own in ours.items():
            setattr(torch.nn.Module, name, own)
