"""Calls computed anew from wider, absolute or slightly other arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.complex64: 23}

Compute = Callable[[Any], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Wider:
    """How to compute the answers anew from other arguments, and what they are given.

    Attributes:
        narrow: native's answers for arguments of the shape of ``arguments``.
        pointwise: no element of an answer is made of several elements of an argument.
        terms: of a loss, what it adds up.
        statistics: what is written is as good as an answer (written.writes_statistics).
        channels: for an operator that accumulates over all of its first argument but one dimension,
            that one's size.
        composed: several operators make the answer; a rounding on the way may grow.
    """

    narrow: Compute
    arguments: Any
    pointwise: bool
    composed: bool = False
    channels: int = 0
    terms: Compute | None = None
    statistics: bool = False

    def compute(self, arguments: Any, what: Compute | None = None) -> Sequence[torch.Tensor]:
        """The answers for wide arguments; functions of integers are computed in float64, too."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(WIDER.get(before, before))
        try:
            return (what or self.narrow)(arguments)
        finally:
            torch.set_default_dtype(before)


def widen(value: Any) -> Any:
    """Floating-point tensors and dtypes in double precision."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in WIDER:
            wide = leaf.detach().to(WIDER[leaf.dtype])
            return wide.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.dtype):
            return WIDER.get(leaf, leaf)
        return leaf

    return tree_map(one, value)


def absolute(value: Any) -> Any:
    """Floating-point tensors without their signs."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().abs().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(one, value)


def moved(value: Any, narrow: Any, draw: int = 0) -> Any:
    """``value``, wide or not, with every number moved by the last place of its narrow dtype.

    None leaves [-1, 1]: there are operators that take probabilities alone.
    """
    generator = torch.Generator().manual_seed(1 + draw)

    def one(leaf: Any, original: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or original.dtype not in BITS:
            return leaf
        signs = torch.randint(0, 2, leaf.size(), generator=generator).to(leaf.device) * 2 - 1
        changed = leaf.detach() * (1 + signs * 2.0 ** -BITS[original.dtype])
        if leaf.is_floating_point():
            changed = torch.where(leaf.abs() <= 1, changed.clamp(-1, 1), changed).detach()
        return changed.to(leaf.dtype).requires_grad_(leaf.requires_grad)

    return tree_map(one, value, narrow)


def tensors_of(value: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def floats_of(value: Any) -> list[torch.Tensor]:
    return [t.detach() for t in tensors_of(value) if t.is_floating_point()]
