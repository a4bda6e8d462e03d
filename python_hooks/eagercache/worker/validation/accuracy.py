"""Errors of a kernel's values and of native's, against a reference in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import (
    FLOAT64_NOISE,
    FORMATS,
    ProofFailed,
    Tolerance,
    compare_with_reference,
    in_parts,
    is_out_of_memory,
    same_bits,
    size_of_terms,
)
from eagercache.calls.samples import Sample, Value
from eagercache.calls.texts import named_line
from eagercache.worker.samples.draws import SEED
from eagercache.worker.validation import written
from eagercache.worker.validation.native import Native


def compare_values(
    call: Call,
    native: Native,
    answers: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tolerance: Tolerance,
) -> tuple[float, float]:
    """Largest errors (kernel's, native's) of one sample, in ulps.

    ``answers`` are native's, ``outputs`` the kernel's, statistics that were written among them.
    """
    for index, (expected, actual) in enumerate(zip(answers, outputs, strict=True)):
        real = torch.float32 if expected.dtype == torch.complex64 else expected.dtype
        if real not in FORMATS and not same_bits(expected, actual):
            raise ProofFailed(
                f"output {index}: {expected.dtype} must be equal bit for bit ({native.fill} data)"
            )
    wide = call.with_wide_floats()
    try:
        with wide.state.applied():
            values = wide.widen(native.sample)
            references = _invoke(call, wide, values)
            magnitudes = references
            if tolerance.reduces:
                magnitudes = _magnitudes(call, wide, wide.widen(native.sample), references)
            if tolerance.composed:
                moved = _moves(call, wide, native.sample, references)
                magnitudes = [
                    magnitude.clamp_min(least) if magnitude.is_floating_point() else magnitude
                    for magnitude, least in zip(magnitudes, moved, strict=True)
                ]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ProofFailed(
            f"not equal bit for bit, and there is no wider reference ({native.fill} data; "
            f"{named_line(error, 100)})"
        ) from error
    overflows = tolerance.reduces and _squares_overflow(native.sample)
    infinite = tolerance.reduces and _has_infinity(native.sample)
    worst = native_worst = 0.0
    for index, (expected, actual, reference, magnitude) in enumerate(
        zip(answers, outputs, references, magnitudes, strict=True)
    ):
        if same_bits(expected, actual):
            continue
        if overflows and reference.size() == expected.size():
            actual = torch.where(torch.isnan(reference), actual, expected)
        if infinite and expected.is_floating_point():
            actual = _with_natives_infinities(expected, actual, reference)
        where = f"output {index}, {native.fill} data"
        mine, natives = compare_with_reference(
            expected, actual, reference, tolerance, where, magnitude
        )
        worst, native_worst = max(worst, mine), max(native_worst, natives)
    return worst, native_worst


def _invoke(call: Call, wide: Call, values: Sequence[Any]) -> list[torch.Tensor]:
    """The outputs of ``wide``, and the statistics that it leaves in ``values``."""
    outputs = wide.invoke(values)
    if written.writes_statistics(call):
        outputs += [values[index] for index in sorted(call.written)]
    return outputs


def _magnitudes(
    call: Call, wide: Call, values: list[Any], references: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """How large the terms are that each element of the answers was summed from.

    The answers of ``wide`` for the absolute values of its floating-point tensors, and at least the
    root mean square of the answer itself and what a loss's terms are. ``values`` are used up.
    """
    unreduced = wide.unreduced()
    terms = unreduced.invoke(values) if unreduced is not None else references
    for place, value in enumerate(values):  # one at a time: each may take much memory
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            values[place] = value.abs()
    largest = max((_largest(value) for value in values), default=0.0)
    magnitudes = []
    answers = _invoke(call, wide, values)
    for answer, reference, each in zip(answers, references, terms, strict=True):
        if not reference.is_floating_point():
            magnitudes.append(answer)
            continue
        floor = _root_mean_square(in_parts(reference))
        # What is left in float64 of a result that is zero is no measure either.
        floor = floor if math.isfinite(floor) and floor > largest * FLOAT64_NOISE else largest
        magnitudes.append(answer.abs().clamp_min(max(floor, size_of_terms(reference, each))))
    return magnitudes


def _moves(
    call: Call, wide: Call, sample: Sample, references: Sequence[torch.Tensor]
) -> list[float]:
    """For each answer, how large the numbers are whose last places it moves by.

    That is, in the root mean square, when every floating-point operand moves by its own last place.
    """
    generator = torch.Generator().manual_seed(SEED)
    moved: list[Value] = []
    for value, spec in zip(wide.widen(sample), call.tensors, strict=True):
        if spec.dtype in FORMATS and isinstance(value, torch.Tensor):
            step = 2.0 ** -FORMATS[spec.dtype][0]
            ups = torch.randint(0, 2, value.size(), generator=generator, dtype=torch.int8)
            value = value * ups.to(value.device, torch.float64).mul_(2 * step).add_(1 - step)
        moved.append(value)
    sizes = []
    for answer, reference in zip(_invoke(call, wide, moved), references, strict=True):
        size = 0.0
        if reference.is_floating_point():
            pairs = zip(in_parts(answer), in_parts(reference), strict=True)
            size = _root_mean_square(one - other for one, other in pairs)
        bits = FORMATS.get(_narrowest(call), (23, 0))[0]
        sizes.append(size * 2.0**bits if math.isfinite(size) else 0.0)
    return sizes


def _root_mean_square(parts: Iterable[torch.Tensor]) -> float:
    """Of the finite numbers among them; 0 where there are none."""
    total, count = 0.0, 0
    for part in parts:
        known = part[torch.isfinite(part)].to(torch.float64)
        total, count = total + float(known.square().sum()), count + known.numel()
    return math.sqrt(total / count) if count else 0.0


def _narrowest(call: Call) -> torch.dtype:
    dtypes = [spec.dtype for spec in call.tensors if spec.dtype in FORMATS]
    return min(dtypes, key=lambda dtype: FORMATS[dtype][0], default=torch.float32)


def _largest(value: Any) -> float:
    """The largest finite magnitude in a floating-point tensor, 0 for anything else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0.0
    finite = (part[torch.isfinite(part)] for part in in_parts(value))
    return max((float(part.abs().max()) for part in finite if part.numel()), default=0.0)


def _squares_overflow(sample: Sample) -> bool:
    """Whether the sum of the squares of some tensor's finite values is past float32's range."""
    for value in sample.values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            squares = (part.to(torch.float64).square() for part in in_parts(value))
            total = sum(float(part[torch.isfinite(part)].sum()) for part in squares)
            if total > torch.finfo(torch.float32).max:
                return True
    return False


def _with_natives_infinities(
    expected: torch.Tensor, actual: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """``actual`` with native's answer where both tell, each in its way, that a term is infinite.

    The kernel keeps the infinity that native's running mean lost, or it has the reference's NaN
    where native's order of the terms kept one.
    """
    same = torch.isnan(expected) & torch.isinf(actual)
    if reference.size() == expected.size():
        same |= torch.isinf(expected) & torch.isnan(actual) & torch.isnan(reference)
    return torch.where(same, expected, actual)


def _has_infinity(sample: Sample) -> bool:
    return any(
        isinstance(value, torch.Tensor) and bool(torch.isinf(value).any())
        for value in sample.values
    )
