"""The tensors among the arguments of a module's call, and the counts that its objects hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagercache.callables.objects import is_count, is_object, parts_of
from eagercache.callables.outputs import COUNT_OFFSET

# What stands for a size that is left open (ModuleShapeClass::kOpen).
OPEN = -1


def argument_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in the order in which the core meets them."""
    return [value for value in sized_values(args, kwargs) if isinstance(value, torch.Tensor)]


def sized_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | int]:
    """The tensors of a call, and the counts that its objects hold, in the core's order.

    Those are what a kernel with symbolic sizes may take for any size or value.
    """
    found: list[torch.Tensor | int] = []

    def walk(value: Any, inside: bool) -> None:
        if isinstance(value, torch.Tensor) or (inside and is_count(value)):
            found.append(value)
        inside = inside or is_object(value)
        for part in parts_of(value):
            walk(part, inside)

    for value in (*args, *kwargs.values()):
        walk(value, inside=False)
    return found


def sizes_of(value: torch.Tensor | int) -> list[int]:
    """A tensor's sizes; a count, as a row of one."""
    return list(value.size()) if isinstance(value, torch.Tensor) else [value]


def stand_in(count: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that a kernel takes for a count, and gives back for one; on ``like``'s device.

    Also run by TorchDynamo, inside of a trace.
    """
    device = like.device if like is not None else None
    return torch.empty((count + COUNT_OFFSET, 0), device=device)
