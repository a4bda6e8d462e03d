"""Where modules are in the model that a program calls, for people who look at a profile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from eagercache.calls.capturing_hooks import is_capturing
from eagercache.calls.known_hooks import is_known


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


def hooks_of(module: torch.nn.Module) -> str:
    """Where the first hook is that keeps a module's calls from its kernel, and what can be done."""
    collects = ""
    for path, part in module.named_modules():
        tables = [vars(part).get(name) or {} for name in _HOOKS]
        for hook in (hook for table in tables for hook in list(table.values())):
            where = f"hooks on {path or type(part).__name__}"
            if is_capturing(hook):
                collects = collects or f"{where}, by which a model around it collects answers"
            if is_known(hook):
                continue
            name = str(getattr(hook, "__module__", None) or type(hook).__module__)
            return f"{where} ({name})"
    return collects or "hooks that are gone, or on all modules"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
