"""Which modules a program chooses for kernels of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Selection = Any  # "auto", a class, a class name, a predicate, or several of the first three


def class_name(module: torch.nn.Module) -> str:
    """The full name of a module's class."""
    return full_name(type(module))


def full_name(kind: type) -> str:
    """The name of a class, with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def names_of(kind: type) -> tuple[str, str, str]:
    """The names by which a class can be chosen."""
    return kind.__name__, kind.__qualname__, full_name(kind)


def chosen_names(selection: Selection) -> list[str]:
    """The names of classes in a selection."""
    return [part for part in _parts(selection) if isinstance(part, str) and part != "auto"]


def is_library_leaf(module: torch.nn.Module) -> bool:
    """A module of torch's without parts is one operator: those have kernels of their own.

    But for recurrent layers, which are many.
    """
    if isinstance(module, torch.nn.RNNBase):
        return False
    return type(module).__module__.startswith("torch.") and not module._modules


def check_selection(selection: Selection) -> None:
    """Raises ValueError for what `modules.ModuleManager.select` does not take."""
    parts = _parts(selection)
    for part in parts:
        if isinstance(part, torch.nn.Module):  # callable, but no function of a module
            raise ValueError(  # noqa: TRY004 - a bad value among several kinds
                f"modules= takes classes of modules, not a model ({class_name(part)}); for one "
                "model call eagercache.accelerate(model) after enable()"
            )
        if not isinstance(part, (str, type)) and not callable(part):
            raise ValueError(  # noqa: TRY004 - a bad value among several kinds
                f"modules={part!r} is not 'auto', a module class, the name of one, a function of a "
                "module, or a list of these"
            )
        if isinstance(part, type) and not issubclass(part, torch.nn.Module):
            raise ValueError(  # noqa: TRY004 - a bad value among several kinds
                f"modules={part!r} is no subclass of torch.nn.Module"
            )


def _parts(selection: Selection) -> Iterable[Any]:
    if selection is None:
        return ()
    if (
        isinstance(selection, (str, type))
        or callable(selection)
        or not isinstance(selection, Iterable)
    ):
        return (selection,)
    return tuple(selection)


def is_selected(selection: Selection, module: torch.nn.Module) -> bool:
    """Whether ``selection`` takes ``module``."""
    for part in _parts(selection):
        if part == "auto":
            return True
        if isinstance(part, str):
            if part in names_of(type(module)):
                return True
        elif isinstance(part, type):
            if isinstance(module, part):
                return True
        elif part(module):
            return True
    return False
