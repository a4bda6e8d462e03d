"""The tensors among the arguments of a module's call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagercache.callables.objects import parts_of

# What stands for a size that is left open (ModuleShapeClass::kOpen).
OPEN = -1


def argument_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in the order in which the core meets them."""
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        for part in parts_of(value):
            walk(part)

    for value in (*args, *kwargs.values()):
        walk(value)
    return found
