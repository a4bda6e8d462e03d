"""How much of a storage a tensor reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one that a tensor reaches, both included."""
    if math.prod(sizes) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def stored_part(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Of ``values``, of as many as ``tensor`` has, those that it stores: `expand` stores one."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            values = values.narrow(dimension, 0, 1)
    return values


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it spans as many elements of memory as it has."""
    return extent(tensor.size(), tensor.stride()) == tensor.numel()
