"""Attributes of modules that cannot be written down, or that change from call to call.

A file, a lock, whoever trains the module; a count of its steps. A module is described without them
(`module_identity`), and a worker has a `Placeholder` in their place. A kernel is made where the
forward reads none of them: its trace says what it reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

# What a description has for one.
ROW = ["opaque"]

# (path of a module below, attribute) of those that are left out because they change.
_left_out: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[tuple[str, str]]] = (
    weakref.WeakKeyDictionary()
)


def left_out(module: torch.nn.Module) -> frozenset[tuple[str, str]]:
    """What `leave_out` was given for ``module``."""
    return _left_out.get(module, frozenset())


def leave_out(module: torch.nn.Module, names: Iterable[tuple[str, str]]) -> bool:
    """Has ``module`` be described without further attributes; False where all were left out."""
    before = left_out(module)
    _left_out[module] = before.union(names)
    return _left_out[module] != before


class OpaqueRead(RuntimeError):
    """The forward reads what no worker was told of."""


@dataclass(frozen=True)
class OpaqueAttribute:
    """One of a module.

    Attributes:
        path, name: of the module below the one that is described, and of the attribute.
        value: the object, which this holds.
        reason: why it cannot be written down, as a clause that names it.
        is_shared: whether equal values elsewhere may be the same object, as small integers are.
    """

    path: str
    name: str
    value: Any
    reason: str
    is_shared: bool


def hide(module: torch.nn.Module, attributes: Iterable[tuple[str, str, str]]) -> None:
    """Puts placeholders there; ``attributes``: (path, name, reason)."""
    for path, name, reason in attributes:
        vars(module.get_submodule(path))[name] = Placeholder(reason)


class Placeholder:
    """What a worker has for one. Using it raises `OpaqueRead`; the trace finds that it is read."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        """Itself: a copy of the module has the same attribute."""
        return self

    @property
    def complaint(self) -> str:
        """Why a module whose forward reads it has no kernel."""
        return f"the forward reads an attribute that cannot be sent to a worker: {self.reason}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OpaqueRead(self.complaint)

    def __getattr__(self, name: str) -> Any:
        """Raises `OpaqueRead`; AttributeError for what copying and pickling ask for."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __bool__ = __call__ = __contains__ = __enter__ = __getitem__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rpow__ = __mod__ = __floordiv__ = __neg__ = __matmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __setitem__ = _refuse
