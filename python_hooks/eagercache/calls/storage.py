"""How much of a storage a tensor reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one that a tensor reaches, both included."""
    if math.prod(sizes) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
