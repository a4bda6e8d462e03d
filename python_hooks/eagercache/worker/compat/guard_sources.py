"""Where the values are that TorchDynamo's sources name, as steps of a path of `guard_rows`."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch

from eagercache.callables.guard_rows import Path, Step, resolve, step_from

# The names of a class: an item of them is one of its attributes.
NAMESPACE: Step = ("namespace", "")
_SCOPE = "___unnamed_scope"
# Before the position of a key: the value at it.
AT_POSITION: Step = ("at", "")


def is_namespace(step: Step, key: Any) -> bool:
    """Whether a step leads to a dictionary whose item ``key`` is an attribute of that name.

    From torch 2.15 on a trace reads the tables of a module that it has assigned to by `__dict__`.
    """
    tables = ("_modules", "_parameters", "_buffers")
    return step == NAMESPACE or (step == ("attr", "__dict__") and key in tables)


def owner_of(path: Path, module: torch.nn.Module) -> str:
    """The name of the Python module that has the value, or the object that leads to it."""
    name = str(path[0][1])
    for length in range(2, len(path)):
        value = resolve(path[:length], module)
        if not isinstance(value, types.ModuleType):
            break
        name = value.__name__
    return name


def variable_path(place: Path, variable: Path) -> Path | None:
    """A variable of the environment; None for an item of another mapping with keys of bytes."""
    if resolve(place, torch.nn.Module()) is not os.environ._data:  # type: ignore[attr-defined]
        return None
    return (("import", "os"), *variable)


def path_from_self(name: str, steps: list[Step]) -> Path | None:
    """A path from the module itself; ``steps``: to the value, the last one first."""
    rest = list(reversed(steps))
    # `torch.export` puts the module into one of its own.
    if rest[:2] == [("attr", "_modules"), ("item", "_export_root")]:
        rest = rest[2:]
    elif rest[:1] == [("attr", "_export_root")]:
        rest = rest[1:]
    elif name == "self" and rest:
        return None
    return (("self", ""), *rest) if name == "self" else None


def steps_of(source: Any, sort: str) -> tuple[Step, ...] | None:
    """From what a source of that sort is based on; None for one that is not known."""
    if "NNModuleSource" in sort or sort == "SkipGuardSource":
        return ()
    if sort in ("AttrSource", "GenericAttrSource", "CellContentsSource") or "Param" in sort:
        return (("attr", source.member),)
    if sort == "ClosureSource":
        return (("attr", "__closure__"),)
    if sort == "CodeSource":
        return (("attr", "__code__"),)
    if sort == "TypeSource":
        return (("type", ""),)
    if sort == "TypeDictSource":
        return (NAMESPACE,)
    if sort == "TypeMROSource":
        return (("attr", "__mro__"),)
    if sort == "DefaultsSource":
        return (("attr", source.field), ("item", source.idx_key))
    if sort in ("GetItemSource", "ListGetItemSource", "DictGetItemSource") or (
        sort == "DictSubclassGetItemSource"
    ):
        key = source.index
        if type(key).__name__ == "ConstDictKeySource":
            return (AT_POSITION, ("key", key.index))
        if isinstance(key, bytes):  # of what `os.environ` has
            return (("variable", os.fsdecode(key)),)
        if getattr(source, "index_is_slice", False) or not isinstance(key, (str, int, bool)):
            return None
        return (("item", key),)
    if sort == "ConstDictKeySource":
        return (("key", source.index),)
    return None


def scopes_of(graph: Any) -> dict[str, str]:
    """By TorchDynamo's name for them (2.15), globals of functions that a request brought along."""
    found = {}
    for name, value in graph.root_tx.f_globals.items():
        if name.startswith(_SCOPE) and isinstance(value, dict):
            module = sys.modules.get(str(value.get("__name__", "")))
            if module is not None:
                found[name] = module.__name__
    return found


def from_opened(rest: Path, opened: torch.nn.Module, inner: str) -> Path | None:
    """A path from an `OpenedCall`: to its module, or to a class of which it builds objects.

    What else is its own is known. ``inner``: what it calls its module.
    """
    if rest[:2] == (("attr", "_modules"), ("item", inner)):
        return (("self", ""), *rest[2:])
    if rest[:1] == (("attr", inner),):
        return (("self", ""), *rest[1:])
    value: Any = opened
    for position, (step, key) in enumerate(rest, 1):
        value = step_from(value, step, key, opened)
        if isinstance(value, type):
            names = value.__qualname__.split(".")
            path: Path = (("import", value.__module__), *(("attr", name) for name in names))
            return (*path, *rest[position:])
    return None
