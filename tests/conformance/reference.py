"""Values: equal bit for bit, or as near to a wider computation as a numerics class promises.

Integers, booleans, float64 and whatever a call writes must be equal bit for bit. A floating-point
result may otherwise differ as the class "accurate" says ("How is a kernel validated?" in
python_hooks/eagercache/worker/README.md): what native itself computes in float64 is the reference,
and errors are counted element by element. Whether an operator accumulates is taken from PyTorch's
own tag `pointwise`, not from what was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from eagercache.calls.numerics import (
    FLOAT64_NOISE,
    HALF,
    ProofFailed,
    Tolerance,
    compare_with_reference,
    same_bits,
    size_of_terms,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.complex64: 23}

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
        torch.set_default_dtype(_WIDER.get(before, before))
        try:
            return (what or self.narrow)(arguments)
        finally:
            torch.set_default_dtype(before)


def widen(value: Any) -> Any:
    """Floating-point tensors and dtypes in double precision."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDER:
            wide = leaf.detach().to(_WIDER[leaf.dtype])
            return wide.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.dtype):
            return _WIDER.get(leaf, leaf)
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
    """The wide ``value`` with every number moved by the last place of its narrow dtype.

    None leaves [-1, 1]: there are operators that take probabilities alone.
    """
    generator = torch.Generator().manual_seed(1 + draw)

    def one(leaf: Any, original: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or original.dtype not in _BITS:
            return leaf
        signs = torch.randint(0, 2, leaf.size(), generator=generator).to(leaf.device) * 2 - 1
        changed = leaf.detach() * (1 + signs * 2.0 ** -_BITS[original.dtype])
        if leaf.is_floating_point():
            changed = torch.where(leaf.abs() <= 1, changed.clamp(-1, 1), changed).detach()
        return changed.requires_grad_(leaf.requires_grad)

    return tree_map(one, value, narrow)


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
        if expected[index].dtype not in _WIDER
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
    reach = one.abs() * 2.0 ** -(_BITS[one.dtype] + 1)
    for draw in range(DRAWS):
        changed = tree_map(
            lambda new, old: new.to(old.dtype) if isinstance(old, torch.Tensor) else new,
            moved(wider.arguments, wider.arguments, draw),
            wider.arguments,
        )
        try:
            answer = wider.narrow(changed)[index]
        except Exception:  # these numbers are none that it takes
            return False
        reach = torch.fmax(reach, (answer - one).abs())
    return bool(((other - one).abs() <= 2 * reach).logical_or(other == one).all())


def _by_error(
    expected: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
    wider: Wider,
    unequal: Sequence[int],
    notes: list[str],
) -> list[str]:
    arguments = widen(wider.arguments)
    references = wider.compute(arguments)
    magnitudes: Sequence[torch.Tensor | None] = [None] * len(references)
    if not wider.pointwise or wider.composed:
        magnitudes = _magnitudes(wider, arguments, references, wider.composed)
    tensors = _floats(wider.arguments)
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
                magnitudes[index],
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
        magnitude = _magnitudes(wider, arguments, references, conditioned=True)[index]
        if magnitude is not None:
            magnitude = torch.fmax(magnitude, _moved_by(wider, arguments, references, index))
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
        magnitude = _magnitudes(wider, arguments, references, wider.composed)[index]
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


DRAWS = 12
FEW = 64
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
            magnitude = _magnitudes(wider, arguments, references, wider.composed)[index]
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
    tensors = _tensors(wider.arguments)
    most = max((t.numel() for t in tensors), default=1)
    longest = max((max(t.size(), default=1) for t in tensors), default=1)
    length = max(most // max(output.numel(), 1), longest, 2)
    if wider.composed:
        length = max(most, 2)
    if wider.channels:
        length = max(length, most // wider.channels)
    return Tolerance(max(1.0, math.log2(length)), reduces=True, composed=wider.composed)


def _magnitudes(
    wider: Wider, arguments: Any, references: Sequence[torch.Tensor], conditioned: bool
) -> list[torch.Tensor | None]:
    """How large the terms are that the answers are made of; see numerics.Tolerance."""
    try:
        of_absolute = list(wider.compute(absolute(arguments)))
    except Exception:  # no answer for absolute values
        of_absolute = list(references)
    largest = max(map(_largest, _floats(arguments)), default=0.0)
    changes: list[float] = [0.0] * len(references)
    if conditioned:
        changes = _moves(wider, arguments, references)
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


def _moves(wider: Wider, arguments: Any, references: Sequence[torch.Tensor]) -> list[float]:
    bits = min((_BITS[t.dtype] for t in _floats(wider.arguments) if t.dtype in _BITS), default=23)
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


def _moved_by(
    wider: Wider, arguments: Any, references: Sequence[torch.Tensor], index: int
) -> torch.Tensor:
    """For each element of an answer how large the numbers are by whose last place it moves.

    The most of some draws in which every operand moves by its own last place: where the rest of two
    large terms stands beside small elements, these tell nothing of it.
    """
    bits = min((_BITS[t.dtype] for t in _floats(wider.arguments) if t.dtype in _BITS), default=23)
    most = torch.zeros_like(references[index])
    for draw in range(DRAWS):
        answer = wider.compute(moved(arguments, wider.arguments, draw))[index]
        most = torch.fmax(most, (answer - references[index]).detach().abs())
    return torch.nan_to_num(most * 2.0**bits, 0.0, 0.0, 0.0)


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


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _floats(value: Any) -> list[torch.Tensor]:
    return [t.detach() for t in _tensors(value) if t.is_floating_point()]


def _largest(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


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
