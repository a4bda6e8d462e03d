"""Classes and constants of an answer, found by their names when a kernel's answer is built."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from typing import Any

import torch

from eagercache.callables.code_values import is_python_class


def cannot_be_made(kind: type) -> str:
    """Why an object of a class is more than its dictionary of attributes; "" where it is not."""
    for base in kind.__mro__:
        if base is object:
            continue
        if not is_python_class(base) or vars(base).get("__slots__"):
            return "which keeps what is not in its dictionary"
        if "__del__" in vars(base):
            return "which does something when it ends"
        if "__getattribute__" in vars(base):
            return "which answers for its attributes itself"
    if issubclass(kind, (torch.nn.Module, enum.Enum)) or isinstance(kind, enum.EnumMeta):
        return "which outlives the call"
    return ""


def constant_of(stored: dict[str, Any]) -> Any:
    """The inverse of `answer_structure.stored_constant`. Raises ValueError for something else."""
    if "dtype" in stored:
        dtype = getattr(torch, stored["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{stored['dtype']} is no dtype")
        return dtype
    if "device" in stored:
        return torch.device(stored["device"])
    if "class" not in stored:
        raise ValueError(f"{stored} is no constant")
    module, path = stored["class"]
    found = find_class(module, path)
    if found is None:
        raise ValueError(f"{module}.{path} is no class")
    return found


def find_class(module: str, path: str) -> type | None:
    """The class of that name, whose module is imported if need be; None where there is none."""
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def is_model_output(kind: type) -> bool:
    """Whether a class is an output of transformers: a dict of what its constructor is given."""
    return any(
        base.__name__ == "ModelOutput" and base.__module__ == "transformers.utils.generic"
        for base in kind.__mro__
    )


def is_fixed(kind: type) -> bool:
    """Whether objects of a class are what their constructor is given, and are changed by no kernel.

    Frozen dataclasses, and the outputs of transformers. As the core has it (nn_modules/objects.h).
    """
    return is_model_output(kind) or is_frozen(kind)


def is_frozen(kind: type) -> bool:
    """Whether a class is a dataclass that lets nobody set attributes."""
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
