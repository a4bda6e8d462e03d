"""Data for the tensors of a call, made from a seed by a rule: its fill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from eagercache.calls.description import ALIGNMENT, CallError, TensorSpec

# What a tensor position of a call is filled with.
Value: TypeAlias = torch.Tensor | bool | int | float | complex


@dataclass
class Sample:
    """Values for every tensor position of a call.

    ``bases`` are whole allocations, guard zones included, None for Python numbers: comparing them
    finds a write outside the tensor as well as one inside.
    """

    values: list[Value]
    bases: list[torch.Tensor | None]

    def clone(self) -> Sample:
        """The same bits in the same layout and alignment, in memory of its own."""
        values: list[Value] = []
        bases: list[torch.Tensor | None] = []
        for value, base in zip(self.values, self.bases, strict=True):
            if base is None or not isinstance(value, torch.Tensor):
                values.append(value)
                bases.append(None)
                continue
            copy = base.clone()
            bases.append(copy)
            values.append(copy.as_strided(value.size(), value.stride(), value.storage_offset()))
        return Sample(values, bases)


# The rules that data is made by. Which ones a call can take depends on what it does with its data
# (indices, probabilities, divisors): a proof uses those that native accepts. "zeros" are of both
# signs, so that they meet in every combination; "wide" reaches the tails of exponentials and
# hyperbolic functions, where what a cancellation leaves decides; the sums of "cancelling" numbers
# show in which order they were added.
FILLS = (
    "normal",
    "unit",
    "integers",
    "extreme",
    "special",
    "sparse_special",
    "ones",
    "zeros",
    "wide",
    "cancelling",
    "negative_zeros",
)
# And of those that some calls are proved on, too: one number everywhere, special values alone.
ALIKE = "alike"
ALL_SPECIAL = "all_special"


def allocate(
    spec: TensorSpec, fill: str, generator: torch.Generator
) -> tuple[Value, torch.Tensor | None]:
    """A value by the rule ``fill``, and the whole allocation that it is a part of."""
    if spec.wrapped:
        return _fill_flat(1, spec.dtype, fill, generator).item(), None
    itemsize = spec.dtype.itemsize
    guard = ALIGNMENT // itemsize
    offset = guard if spec.aligned else guard + 1
    base = _fill_flat(offset + spec.extent + guard, spec.dtype, fill, generator)
    value = base.as_strided(spec.sizes, spec.strides, offset)
    if (value.data_ptr() % ALIGNMENT == 0) != spec.aligned:
        raise CallError("the allocator gives another alignment than the call had")
    return value, base


def _fill_flat(
    count: int, dtype: torch.dtype, fill: str, generator: torch.Generator
) -> torch.Tensor:
    """``count`` elements in memory order; overlapping tensors see some of them twice."""
    if fill == "ones":
        return torch.ones(count, dtype=dtype, device=generator.device)
    if fill in ("zeros", "negative_zeros") and not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(count, dtype=dtype, device=generator.device)
    if dtype == torch.bool:
        return torch.randint(
            0, 2, (count,), dtype=torch.uint8, generator=generator, device=generator.device
        ).to(dtype)
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        flat = _fill_flat(2 * count, part, fill, generator)
        return torch.view_as_complex(flat.view(count, 2))
    if dtype.is_floating_point:
        return _fill_floats(count, dtype, fill, generator)
    return _fill_integers(count, dtype, fill, generator)


def _fill_floats(
    count: int, dtype: torch.dtype, fill: str, generator: torch.Generator
) -> torch.Tensor:
    if fill in ("unit", "wide"):
        part = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
        return (part if fill == "unit" else 32 * part - 16).to(dtype)
    if fill == "negative_zeros":
        return torch.full((count,), -0.0, dtype=dtype, device=generator.device)
    if fill == ALIKE:
        part = torch.rand(1, generator=generator, dtype=torch.float64, device=generator.device)
        return (0.25 + 0.75 * part).to(dtype).repeat(count)
    if fill == "zeros":
        signs = torch.randint(0, 2, (count,), generator=generator, device=generator.device)
        return torch.where(signs > 0, 0.0, -0.0).to(dtype)
    if fill == "integers":
        return torch.randint(-4, 5, (count,), generator=generator, device=generator.device).to(
            dtype
        )
    flat = torch.randn(count, generator=generator, dtype=torch.float64, device=generator.device).to(
        dtype
    )
    info = torch.finfo(dtype)
    if fill == "cancelling":
        large = 2.0 ** {torch.float64: 50, torch.float16: 10}.get(dtype, 20)
        return _scatter(flat, torch.tensor([large, -large], dtype=dtype), 2, generator)
    finite = [0.0, -0.0, info.smallest_normal, info.smallest_normal / 2, -info.smallest_normal / 4,
              info.max, info.min, info.eps, 1.0, -1.0]  # fmt: skip
    values = finite if fill == "extreme" else [*finite, math.nan, math.inf, -math.inf]
    if fill not in ("extreme", "special", "sparse_special", ALL_SPECIAL):
        return flat
    every = {"sparse_special": 97, ALL_SPECIAL: 1}.get(fill, 3)
    return _scatter(flat, torch.tensor(values, dtype=torch.float64).to(dtype), every, generator)


def _fill_integers(
    count: int, dtype: torch.dtype, fill: str, generator: torch.Generator
) -> torch.Tensor:
    info = torch.iinfo(dtype)
    if fill == "unit":  # usable as an index, a class label, a shift
        return torch.randint(0, 2, (count,), generator=generator, device=generator.device).to(dtype)
    # "wide" integers are past what half precision holds exactly.
    reach = {"normal": 100, "cancelling": 100, "wide": 100_000}.get(fill, 4)
    low, high = max(-reach, info.min), min(reach, info.max) + 1
    flat = torch.randint(low, high, (count,), generator=generator, device=generator.device).to(
        dtype
    )
    if fill not in ("extreme", "special", "sparse_special"):
        return flat
    values = torch.tensor([info.min, info.max, info.min + 1, info.max - 1, 0, 1], dtype=dtype)
    return _scatter(flat, values, 97 if fill == "sparse_special" else 3, generator)


def _scatter(
    flat: torch.Tensor, values: torch.Tensor, every: int, generator: torch.Generator
) -> torch.Tensor:
    count = flat.numel()
    chosen = torch.randint(0, every, (count,), generator=generator, device=flat.device) == 0
    which = torch.randint(0, values.numel(), (count,), generator=generator, device=flat.device)
    return torch.where(chosen, values.to(flat.device)[which], flat)
