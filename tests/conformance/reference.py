"""Values: equal bit for bit, or as near to a wider computation as a numerics class promises.

Integers, booleans, float64 and whatever a call writes must be equal bit for bit. A floating-point
result may otherwise differ as the class "accurate" says ("How is a kernel validated?" in
python_hooks/eagercache/worker/README.md): what native itself computes in float64 is the reference,
and errors are counted element by element. Whether an operator accumulates is taken from PyTorch's
own tag `pointwise`, not from what was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from eagercache.calls.numerics import (
    HALF,
    ProofFailed,
    Tolerance,
    compare_with_reference,
    same_bits,
)
from torch.utils._pytree import tree_map

from .magnitudes import DRAWS, furthest, magnitudes, moved_by
from .wider import BITS, WIDER, Wider, floats_of, tensors_of, widen


def differences(
    expected: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
    wider: Wider | None,
    notes: list[str] | None = None,
) -> list[str]:
    """What of ``actual`` is not what the class promises; dtypes and sizes are equal already.

    ``notes`` gets answers past the bound for these very numbers that are none the less what the
    operator is good for: "ill-conditioned", where moving every argument by its last place moves the
    answer as much, and "few numbers", where native errs as much on others of their kind.
    """
    unequal = [
        index
        for index, (one, other) in enumerate(zip(expected, actual, strict=True))
        if not same_bits(one, other)
    ]
    exact = [
        f"output {index}: {expected[index].dtype} is not equal bit for bit "
        f"({_first_difference(expected[index], actual[index])})"
        for index in unequal
        if expected[index].dtype not in WIDER
    ]
    if exact or not unequal:
        return exact
    if wider is None:
        return [
            f"output {index} is not equal bit for bit ("
            f"{_first_difference(expected[index], actual[index])})"
            for index in unequal
        ]
    notes = notes if notes is not None else []
    try:
        return _by_error(expected, actual, wider, unequal, notes)
    except Exception as error:  # native does not compute this in double precision
        reason = f"there is no wider reference ({type(error).__name__}: {str(error)[:80]})"
    found = []
    for index in unequal:
        text = f"output {index} differs ({_first_difference(expected[index], actual[index])})"
        if wider.composed and _is_within_reach(wider, index, expected[index], actual[index]):
            notes.append(f"ill-conditioned: {text}")
        else:
            found.append(f"{text}, and {reason}")
    return found


def _is_within_reach(wider: Wider, index: int, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether native's own answer moves as far when its arguments move by their last place.

    Twice as far, and by its own last place: few draws do not find the most.
    """
    try:
        reach = furthest(lambda given: wider.narrow(given)[index], wider.arguments, wider, one)
    except Exception:  # some of these numbers are none that it takes
        return False
    allowed = torch.fmax(2 * reach, one.abs() * 2.0 ** -BITS[one.dtype])
    return bool(((other - one).abs() <= allowed).logical_or(other == one).all())


def _by_error(
    expected: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
    wider: Wider,
    unequal: Sequence[int],
    notes: list[str],
) -> list[str]:
    arguments = widen(wider.arguments)
    references = wider.compute(arguments)
    terms: Sequence[torch.Tensor | None] = [None] * len(references)
    if not wider.pointwise or wider.composed:
        terms = magnitudes(wider, arguments, references, wider.composed)
    tensors = floats_of(wider.arguments)
    overflows = not wider.pointwise and any(map(_squares_overflow, tensors))
    infinite = not wider.pointwise and any(bool(torch.isinf(t).any()) for t in tensors)
    found = []
    for index in unequal:
        tolerance = _tolerance(wider, expected[index])
        answer, reference = actual[index], references[index]
        lenient = reference.size() == answer.size() and answer.is_floating_point()
        if lenient and not _selects(expected[index], tensors):
            if overflows:
                answer = torch.where(torch.isnan(reference), answer, expected[index])
            if infinite:
                answer = _allow_lost_infinities(expected[index], answer, reference)
        try:
            compare_with_reference(
                expected[index],
                answer,
                reference,
                tolerance,
                f"output {index}",
                terms[index],
            )
        except ProofFailed as failed:
            text = f"{failed}; {_first_difference(expected[index], answer)}"
            excuse = _excuse(wider, arguments, references, index, expected, answer, tolerance)
            if excuse:
                notes.append(f"{excuse}: {text}")
            else:
                found.append(text)
    return found


def _excuse(
    wider: Wider,
    arguments: Any,
    references: Sequence[torch.Tensor],
    index: int,
    expected: Sequence[torch.Tensor],
    answer: torch.Tensor,
    tolerance: Tolerance,
) -> str:
    """Why an answer past the bound is as good as native's, in a word; "" where it is not."""
    one, reference = expected[index], references[index]
    if not wider.pointwise and not wider.composed:
        magnitude = magnitudes(wider, arguments, references, conditioned=True)[index]
        if magnitude is not None:
            magnitude = torch.fmax(magnitude, moved_by(wider, arguments, references, index))
        try:
            compare_with_reference(one, answer, reference, tolerance, "", magnitude)
        except ProofFailed:
            pass
        else:
            return "ill-conditioned"
    half = one.dtype in HALF
    if half and not wider.composed:
        return ""  # computed in float32 and rounded once
    worst = max((_native_error(wider, draw, index) for draw in range(DRAWS)), default=0.0)
    if not worst:
        return ""
    least = 1.0 if half else tolerance.ulps
    # Where native errs by much more on some numbers, that says nothing of these.
    most = max(least, MOST_EXCUSED_HALF if half else MOST_EXCUSED)
    allowed = _AsNative(min(max(least, 2 * worst), most), tolerance.reduces, tolerance.composed)
    magnitude = None
    if not wider.pointwise or wider.composed:
        magnitude = magnitudes(wider, arguments, references, wider.composed)[index]
    try:
        compare_with_reference(one, answer, reference, allowed, "", magnitude)
    except ProofFailed:
        return ""
    return "few numbers"


@dataclass(frozen=True)
class _AsNative(Tolerance):
    """What native errs by is known from other numbers."""

    def bound(self, native_error: float, dtype: torch.dtype) -> float:
        """As given."""
        return self.ulps


# Units in the last place that an answer may be off by because native is on other numbers.
MOST_EXCUSED = 32.0
MOST_EXCUSED_HALF = 4.0


def _native_error(wider: Wider, draw: int, index: int) -> float:
    """Native's own largest error, in ulps, on other numbers of the arguments' kind."""
    generator = torch.Generator().manual_seed(draw)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        factors = (torch.rand(leaf.size(), generator=generator) + 0.5).to(leaf.device)
        return (leaf.detach() * factors.to(leaf.dtype)).requires_grad_(leaf.requires_grad)

    other = tree_map(one, wider.arguments)
    try:
        answer = wider.narrow(other)[index]
        arguments = widen(other)
        references = wider.compute(arguments)
        magnitude = None
        if not wider.pointwise or wider.composed:
            magnitude = magnitudes(wider, arguments, references, wider.composed)[index]
        unlimited = Tolerance(1e30, reduces=True)
        compared = compare_with_reference(
            answer, answer, references[index], unlimited, "", magnitude
        )
    except Exception:  # these numbers are none that it takes
        return 0.0
    return compared[1] if math.isfinite(compared[1]) else 0.0


def _selects(answer: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    """Whether every number of ``answer`` is one that was given: nothing was added up."""
    numbers = answer.detach()[torch.isfinite(answer)].to(torch.float64)
    known = [t[torch.isfinite(t)].to(numbers.device, torch.float64) for t in given]
    return numbers.numel() > 1 and bool(known) and bool(torch.isin(numbers, torch.cat(known)).all())


def _tolerance(wider: Wider, output: torch.Tensor) -> Tolerance:
    if wider.pointwise and not wider.composed:
        return Tolerance()
    tensors = tensors_of(wider.arguments)
    most = max((t.numel() for t in tensors), default=1)
    longest = max((max(t.size(), default=1) for t in tensors), default=1)
    length = max(most // max(output.numel(), 1), longest, 2)
    if wider.composed:
        length = max(most, 2)
    if wider.channels:
        length = max(length, most // wider.channels)
    return Tolerance(max(1.0, math.log2(length)), reduces=True, composed=wider.composed)


def _squares_overflow(value: torch.Tensor) -> bool:
    squares = value.to(torch.float64).square()
    return float(squares[torch.isfinite(squares)].sum()) > torch.finfo(torch.float32).max


def _allow_lost_infinities(
    expected: torch.Tensor, actual: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """Where a term is infinite, NaN and infinity tell the same of an accumulation."""
    same = torch.isnan(expected) & torch.isinf(actual)
    same |= torch.isinf(expected) & torch.isnan(actual) & torch.isnan(reference)
    return torch.where(same, expected, actual)


def _first_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """The first element that is another one, and how many are."""
    if expected.size() != actual.size() or expected.dtype != actual.dtype:
        return "another size or dtype"
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    unequal = expected != actual
    if expected.is_floating_point():
        unequal |= torch.signbit(expected) != torch.signbit(actual)
        unequal &= ~(torch.isnan(expected) & torch.isnan(actual))
    places = unequal.reshape(-1).nonzero().reshape(-1)
    if places.numel() == 0:
        return "equal"
    one = int(places[0])
    left, right = expected.reshape(-1)[one].item(), actual.reshape(-1)[one].item()
    return f"{places.numel()} of {expected.numel()}, element {one}: native {left!r}, here {right!r}"
