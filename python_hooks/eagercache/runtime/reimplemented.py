"""Whether the program has put implementations of its own in the place of PyTorch's operators.

A kernel of a whole module or a function has PyTorch's computations inside, and calls nothing that
the program registers with `torch.library`. Libraries that the collector frees are noticed at the
next change.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_METHODS = ("impl", "_impl_with_aoti_compile", "_destroy")
# What no dense tensor of a CPU or a CUDA device passes.
_ELSEWHERE = (
    "Meta",
    "MPS",
    "XPU",
    "XLA",
    "Sparse",
    "Nested",
    "Quantized",
    "PrivateUse",
    "FuncTorch",
)
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Where `torch.library` registers what a program gives to its functions.
_FOR_PROGRAMS = (f"{_TORCH}library.py:", f"{_TORCH}_library{os.sep}")

_watchers: list[Callable[[], None]] = []


def is_reimplemented() -> bool:
    """Whether an operator of ATen has an implementation of the program's now."""
    for row in list(torch.library._impls):
        space, _, rest = row.partition("/")
        operator, _, key = rest.rpartition("/")
        if space == "aten" and not key.startswith(_ELSEWHERE) and not _is_torchs(operator, key):
            return True
    return False


def _is_torchs(operator: str, key: str) -> bool:
    """Whether PyTorch itself has registered that, as its newer flash attentions do."""
    # Rows like "CPU: registered at FILE:LINE :: ..."; without a key it is the alias's row.
    rows = torch._C._dispatch_dump(f"aten::{operator}").splitlines()
    places = [
        row.partition(": registered at ")[2]
        for row in rows
        if row.startswith(key or "CompositeImplicitAutograd[alias]") and ".py:" in row
    ]
    return len(places) > 0 and all(
        place.startswith(_TORCH) and not place.startswith(_FOR_PROGRAMS) for place in places
    )


def watch_libraries(changed: Callable[[], None]) -> None:
    """Has ``changed`` called after each change of a library, from now on; once for each of them."""
    if changed in _watchers:
        return
    if not _watchers:
        for name in _METHODS:
            setattr(torch.library.Library, name, _noticed(getattr(torch.library.Library, name)))
    _watchers.append(changed)


def _noticed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change(self: torch.library.Library, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            if self.ns == "aten":
                for watcher in _watchers:
                    watcher()

    return change
