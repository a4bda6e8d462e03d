"""Calls that programs are made of: an operator, its arguments, and the layout of its tensors.

A template fixes all that a kernel's key depends on, so that a set of templates is a set of keys.
Which tensors stand in the slots (fresh ones, earlier answers, views of one memory) is a program's
matter. Everything here is drawn from a `random.Random`: the same seed gives the same templates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

Sizes = tuple[int, ...]

LAYOUTS = (
    "contiguous",
    "transposed",
    "channels_last",
    "offset",
    "sliced",
    "stepped",
    "expanded",
)


@dataclass(frozen=True)
class Spec:
    """A tensor but for its data.

    Attributes:
        layout: one of LAYOUTS; those that a rank cannot have are contiguous.
        values: the rule for data: "any", or "unit" for numbers from 0 to 1.
    """

    dtype: str
    sizes: Sizes
    layout: str = "contiguous"
    values: str = "any"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def place(self) -> tuple[Sizes, int, int]:
        """(strides, offset, elements of the memory that holds the tensor)."""
        return _place(self.sizes, self.layout)


@functools.cache
def _place(sizes: Sizes, layout: str) -> tuple[Sizes, int, int]:
    strides = list(_dense(sizes, range(len(sizes))))
    offset = 0
    if layout == "transposed" and len(sizes) > 1:
        order = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
        strides = list(_dense(sizes, order))
    elif layout == "channels_last" and len(sizes) == 4:
        strides = list(_dense(sizes, (0, 2, 3, 1)))
    elif layout == "offset":
        offset = 1
    elif layout == "sliced" and sizes:
        wider = (*sizes[:-1], sizes[-1] + 3)
        strides, offset = list(_dense(wider, range(len(wider)))), 1
    elif layout == "stepped" and sizes:
        strides = [2 * stride for stride in strides]
    elif layout == "expanded" and sizes:
        strides = [0, *_dense(sizes[1:], range(len(sizes) - 1))]
    reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return tuple(strides), offset, offset + (reach if math.prod(sizes) else 0)


def _dense(sizes: Sequence[int], order: Sequence[int]) -> Sizes:
    """Strides without gaps, `order` naming the dimensions from the outermost inwards."""
    strides = [1] * len(sizes)
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(sizes[dimension], 1)
    return tuple(strides)


@dataclass(frozen=True)
class Slot:
    """Where the tensor of this index stands among the arguments."""

    index: int


@dataclass(frozen=True)
class Named:
    """An argument that is an attribute of torch: a dtype, a memory format."""

    name: str

    @property
    def value(self) -> Any:
        """The attribute."""
        return getattr(torch, self.name)


@dataclass(frozen=True)
class Template:
    """One call, its tensors left open.

    Attributes:
        function: a path from `torch` on: "torch.add", "torch.Tensor.add_".
        arguments, keywords: numbers, lists, `Named`s, and a `Slot` for each tensor.
        writes: the slots that the call writes.
    """

    function: str
    arguments: tuple[Any, ...]
    specs: tuple[Spec, ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    writes: tuple[int, ...] = ()

    @property
    def differentiable(self) -> bool:
        """Whether a gradient may be asked for."""
        return not self.writes and any(spec.dtype in FLOATS for spec in self.specs)


def words(text: str) -> tuple[str, ...]:
    """The words of a list; what stands there twice is drawn twice as often."""
    return tuple(text.split())


FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int64", "int32", "uint8", "int8", "int16")
SHAPES: tuple[Sizes, ...] = (
    (),
    (1,),
    (7,),
    (64,),
    (130,),
    (3, 5),
    (16, 17),
    (4, 1),
    (33, 8),
    (2, 3, 4),
    (4, 16, 8),
    (2, 4, 5, 5),
    (2, 8, 4, 4),
    (1, 3, 6, 6),
)
IMAGES: tuple[Sizes, ...] = ((2, 4, 5, 5), (2, 8, 4, 4), (1, 3, 6, 6), (2, 4, 8, 8))
SCALARS = (0, 1, 2, -1, 3, 0.5, -1.5, 2.0, 1e-3)


def float_type(rng: Random) -> str:
    """A floating-point dtype, float32 most of the time."""
    return rng.choices(FLOATS, (10, 4, 2, 3))[0]


def number_type(rng: Random) -> str:
    """Any dtype with arithmetic."""
    kind = rng.random()
    if kind < 0.62:
        return float_type(rng)
    if kind < 0.92:
        return rng.choices(INTEGERS, (6, 3, 1, 1, 1))[0]
    return "bool" if kind < 0.97 else "complex64"


def shape(rng: Random) -> Sizes:
    """A shape; now and then an empty one, which kernels leave to native."""
    if rng.random() < 0.02:
        return rng.choice(((0,), (0, 3), (2, 0, 4)))
    return rng.choices(SHAPES, [2 if 8 <= math.prod(s) <= 300 else 1 for s in SHAPES])[0]


def layout(rng: Random, sizes: Sizes, *, written: bool = False) -> str:
    """A layout that the rank can have; of a written tensor one that may be written."""
    weights = {"contiguous": 10, "offset": 1}
    if sizes:
        weights.update(sliced=2, stepped=2, expanded=0 if written else 1)
    if len(sizes) > 1:
        weights["transposed"] = 3
    if len(sizes) == 4:
        weights["channels_last"] = 4
    return rng.choices(list(weights), list(weights.values()))[0]


def spec(rng: Random, dtype: str, sizes: Sizes, *, written: bool = False) -> Spec:
    """A tensor of some layout."""
    return Spec(dtype, sizes, layout(rng, sizes, written=written))


def partner(rng: Random, sizes: Sizes) -> Sizes:
    """A shape that broadcasts with `sizes`."""
    kind = rng.random()
    if kind < 0.65 or not sizes:
        return sizes
    if kind < 0.75:
        return ()
    if kind < 0.9:
        return sizes[1:]
    return tuple(1 if rng.random() < 0.5 else size for size in sizes)
