"""How large the numbers are that an answer is made of: by their last places answers may differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from eagercache.calls.numerics import FLOAT64_NOISE, size_of_terms
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .wider import BITS, Wider, absolute, floats_of, moved

DRAWS = 12
FEW = 64


def magnitudes(
    wider: Wider, arguments: Any, references: Sequence[torch.Tensor], conditioned: bool
) -> list[torch.Tensor | None]:
    """How large the terms are that the answers are made of; see numerics.Tolerance."""
    try:
        of_absolute = list(wider.compute(absolute(arguments)))
    except Exception:  # no answer for absolute values
        of_absolute = list(references)
    largest = max(map(_largest, floats_of(arguments)), default=0.0)
    changes: list[float] = [0.0] * len(references)
    if conditioned:
        changes = moves(wider, arguments, references)
    terms: Sequence[torch.Tensor] = references
    if wider.terms is not None:
        terms = wider.compute(arguments, wider.terms)
    made: list[torch.Tensor | None] = []
    for answer, reference, least, each in zip(of_absolute, references, changes, terms, strict=True):
        if not reference.is_floating_point() or answer.size() != reference.size():
            made.append(None)
            continue
        root = _root_mean_square(reference)
        floor = root if math.isfinite(root) and root > largest * FLOAT64_NOISE else largest
        # Absolute values may have no answer where the call has one: softmax with -inf among them.
        known = torch.where(torch.isfinite(answer), answer, reference).detach().abs()
        least = max(floor, least, size_of_terms(reference.detach(), each.detach()))
        made.append(torch.nan_to_num(known, 0.0, 0.0, 0.0).clamp_min(least))
    return made


def moves(wider: Wider, arguments: Any, references: Sequence[torch.Tensor]) -> list[float]:
    bits = min((BITS[t.dtype] for t in floats_of(wider.arguments) if t.dtype in BITS), default=23)
    sizes = _changes([wider.compute(moved(arguments, wider.arguments))], references, bits)
    if wider.composed:
        # Of a few numbers one draw of signs may cancel; of many it tells as much as several.
        few = any(r.numel() < FEW for r in references)
        within = []
        for draw in range(DRAWS if few else 1):
            with Moving(bits, draw):
                within.append(wider.compute(arguments))
        sizes = list(map(max, sizes, _changes(within, references, bits)))
    return sizes


def moved_by(
    wider: Wider, arguments: Any, references: Sequence[torch.Tensor], index: int
) -> torch.Tensor:
    """For each element of an answer how large the numbers are by whose last place it moves.

    The most of some draws in which every operand moves by its own last place: where the rest of two
    large terms stands beside small elements, these tell nothing of it.
    """
    bits = min((BITS[t.dtype] for t in floats_of(wider.arguments) if t.dtype in BITS), default=23)
    most = furthest(lambda given: wider.compute(given)[index], arguments, wider, references[index])
    return torch.nan_to_num(most * 2.0**bits, 0.0, 0.0, 0.0)


def furthest(
    compute: Callable[[Any], torch.Tensor], arguments: Any, wider: Wider, answer: torch.Tensor
) -> torch.Tensor:
    """The most that each element of ``answer`` moves by, in some draws, with ``arguments``."""
    most = torch.zeros_like(answer.detach().abs())
    for draw in range(DRAWS):
        other = compute(moved(arguments, wider.arguments, draw))
        most = torch.fmax(most, (other - answer).detach().abs())
    return most


def _changes(
    draws: Sequence[Sequence[torch.Tensor]], references: Sequence[torch.Tensor], bits: int
) -> list[float]:
    """For each answer how large the numbers are whose last place the draws move it by."""
    sizes = [0.0] * len(references)
    for index, reference in enumerate(references):
        answers = [draw[index] for draw in draws]
        if reference.is_floating_point() and all(a.size() == reference.size() for a in answers):
            changes = torch.stack([(answer - reference).detach() for answer in answers])
            size = _root_mean_square(changes) * 2.0**bits
            sizes[index] = size if math.isfinite(size) else 0.0
    return sizes


class Moving(TorchDispatchMode):
    """Moves every floating-point result of an operator by the last of ``bits`` binary places."""

    def __init__(self, bits: int, draw: int = 0) -> None:
        super().__init__()
        self._unit = 2.0**-bits
        self._generator = torch.Generator().manual_seed(2 + draw)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            return made
        return tree_map(self._move, made)

    def _move(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in (torch.float64, torch.float32):
            return leaf
        signs = torch.randint(0, 2, leaf.size(), generator=self._generator) * 2 - 1
        return leaf * (1 + signs.to(leaf.device).to(leaf.dtype) * self._unit)


def _root_mean_square(value: torch.Tensor) -> float:
    known = value.detach()[torch.isfinite(value)].to(torch.float64)
    return float(known.square().mean().sqrt()) if known.numel() else 0.0


def _largest(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0
