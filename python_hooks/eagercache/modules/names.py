"""Where modules are in the model that a program calls, for people who look at a profile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch


class ModuleNames:
    """Names of modules: "layers.0.mlp", or the class of one that is a part of no other.

    ``met`` gives the modules that the program has called so far, in any order. Called under the
    GIL, only while a profiler listens. A name stays what it was first.
    """

    def __init__(self, met: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._met = met
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def name_of(self, module: torch.nn.Module) -> str:
        """The path of ``module`` below the outermost module that was met, or its class."""
        if module not in self._paths:
            self._look()
        return self._paths.get(module, "") or type(module).__name__

    def _look(self) -> None:
        for root in self._met():
            for path, part in root.named_modules():
                # Below the outermost module a path is longest.
                if len(path) >= len(self._paths.get(part, "")):
                    self._paths[part] = path
