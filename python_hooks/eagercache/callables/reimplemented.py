"""Whether the program has put implementations of its own in the place of PyTorch's operators.

A kernel of a whole module has PyTorch's computations inside, and calls nothing that the program
registers with `torch.library`. Libraries that the collector frees are noticed at the next change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_METHODS = ("impl", "_impl_with_aoti_compile", "_destroy")
# What no dense tensor of a CPU or a CUDA device passes.
_ELSEWHERE = ("Meta", "MPS", "XPU", "XLA", "Sparse", "Nested", "Quantized", "PrivateUse")

_watchers: list[Callable[[], None]] = []


def is_reimplemented() -> bool:
    """Whether an operator of ATen has an implementation of the program's now."""
    for row in list(torch.library._impls):
        space, _, rest = row.partition("/")
        if space == "aten" and not rest.rpartition("/")[2].startswith(_ELSEWHERE):
            return True
    return False


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
