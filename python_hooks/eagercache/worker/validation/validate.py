"""Whether a kernel equals native.

Both run the described call in this process: native through the ordinary dispatcher, the kernel
through `_C.Probe`, which lets it answer one call of the hooked operator exactly as a hit would.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import (
    FORMATS,
    CannotProve,
    NotBitwise,
    ProofFailed,
    Tolerance,
    in_double,
    same_bits,
    same_bytes,
)
from eagercache.calls.samples import FILLS, Sample
from eagercache.worker.samples.draws import SEED, computes_alike, extra_draws, telling_draws
from eagercache.worker.samples.ordinary_operands import is_ordinary
from eagercache.worker.timing.timing import Probe
from eagercache.worker.validation.accuracy import compare_values
from eagercache.worker.validation.metadata import compare_metadata, compare_versions
from eagercache.worker.validation.native import (
    Native,
    further_answers,
    is_large,
    place_of,
    seed_of,
    tensors_at,
)
from eagercache.worker.validation.native_errors import must_raise_too
from eagercache.worker.validation.tolerances import (
    HARD_FACTOR,
    HARD_FILLS,
    accumulates,
    rounding_hides_bits,
    tolerance_of,
)
from eagercache.worker.validation.written import (
    WRITES,
    compare_returned,
    compare_written,
    must_be_bitwise,
    written_statistics,
)


@dataclass(frozen=True)
class Proof:
    """The result of `prove`."""

    numerics: str  # "bitwise" or "accurate"
    fills: tuple[str, ...]
    seed: int
    largest_error: float  # ulps of the result, over samples that were not equal bit for bit
    native_error: float  # native's own, the same way


def capture(call: Call, probe: Probe, sample: Sample, choose: str) -> str:
    """Lets the probe keep the call; the digest of its key. Raises CannotProve."""
    probe.capture()
    call.invoke(sample.values)
    if not probe.captured:
        raise CannotProve("the rebuilt call did not reach the hook")
    if probe.aside:
        raise CannotProve(f"the rebuilt call steps aside: {probe.aside}")
    if probe.warning:
        # A kernel would be silent.
        raise CannotProve(f"native warns: {probe.warning.splitlines()[0][:200]}")
    return probe.digest(choose)


def prove(
    call: Call,
    probe: Probe,
    natives: Sequence[Native],
    *,
    reduces: bool = False,
    approximates: bool = False,
    calls_functions: bool = False,
    composed: bool = False,
    others: int = 0,
) -> Proof:
    """Compares the probe's loaded kernel with native. The probe must have captured the call.

    ``reduces`` tells whether the kernel accumulates over elements, ``composed`` whether the
    operator is a function of several; see `Tolerance`. ``calls_functions``: those whose last bit
    depends on who computes them; ``approximates``: it does, or rounds more than once in a row. The
    same kernel is proved on ``others`` calls, too.

    Raises ProofFailed (NotBitwise among them).
    """
    reduces = reduces or accumulates(call)
    tolerance = tolerance_of(call, natives[0].outputs, reduces, composed)
    made = [*natives[0].outputs, *tensors_at(natives[0].after, call.written)]
    by_luck = (reduces or approximates) and rounding_hides_bits(natives[0])
    if calls_functions and not computes_alike(call, made, reduces=reduces, others=others):
        by_luck = True
        if any(tensor.dtype not in FORMATS and not _is_exact(tensor.dtype) for tensor in made):
            raise ProofFailed(f"bitwise by luck at best: a rounded function of {made[0].dtype}")
    numerics = "bitwise"
    if in_double(call) or by_luck:
        if must_be_bitwise(call):
            rounded = "function" if calls_functions or not reduces else "sum"
            raise NotBitwise(f"bitwise by luck at best: a rounded {rounded}, {WRITES}")
        numerics = "accurate"
    worst = native_worst = 0.0
    rejected: list[tuple[str, int]] = []
    if not is_large(call):
        answered = {native.fill for native in natives}
        rejected += [(fill, seed_of(fill)) for fill in call.fills if fill not in answered]
    telling = further_answers(call, telling_draws(call, reduces=reduces, others=others), rejected)
    further = further_answers(call, extra_draws(call, made, others), rejected)
    for native in itertools.chain(natives, telling, further):
        about_bits = native.seed >= SEED + len(FILLS) and native.fill in FILLS
        if numerics != "bitwise" and about_bits:
            if reduces:
                break  # what it may err by is known: the further samples are about bits alone
            if native.fill not in ("normal", "unit", "special"):
                continue
        if not is_ordinary(call, native.sample):
            _must_leave_to_native(call, probe, native)
            continue
        if (errors := _compare(call, probe, native, tolerance, composed)) is not None:
            numerics = "accurate"
            worst, native_worst = max(worst, errors[0]), max(native_worst, errors[1])
    must_raise_too(call, probe, natives[0].sample, rejected)
    _compare_in_inference_mode(call, probe, natives[0])
    return Proof(
        numerics=numerics,
        fills=tuple(native.fill for native in natives),
        seed=SEED,
        largest_error=worst,
        native_error=native_worst,
    )


def _compare(
    call: Call, probe: Probe, native: Native, tolerance: Tolerance, composed: bool
) -> tuple[float, float] | None:
    """The kernel's error in this sample, and native's; None where they are equal bit for bit."""
    outputs, left = _answer(call, probe, native)
    compare_metadata(native.outputs, outputs, native.fill)
    if not composed:  # a function's own in-place steps count on what it returns
        compare_versions(native.outputs, outputs, native.fill)
    outputs += left
    expected = [*native.outputs, *written_statistics(call, native.after)]
    if all(same_bits(a, b) for a, b in zip(expected, outputs, strict=True)):
        return None
    if must_be_bitwise(call):
        raise NotBitwise(f"not bitwise ({native.fill} data), {WRITES}")
    if tolerance.reduces and native.fill in HARD_FILLS:
        tolerance = replace(tolerance, ulps=HARD_FACTOR * tolerance.ulps)
    return compare_values(call, native, expected, outputs, tolerance)


def _is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype == torch.complex128)


def _answer(call: Call, probe: Probe, native: Native) -> tuple[list[Any], list[torch.Tensor]]:
    """The kernel's outputs for a copy of the sample, which must come back as native leaves it.

    And the statistics that it left.
    """
    mine = native.sample.clone()
    places = [place_of(value) for value in mine.values]
    outputs = _force(call, probe, mine)
    if [place_of(value) for value in mine.values] != places:
        raise ProofFailed(f"an argument was moved or resized ({native.fill} data)")
    expected = native.after or native.sample
    for index, (before, after) in enumerate(zip(expected.bases, mine.bases, strict=True)):
        if before is None or after is None or index in call.written:
            continue
        if not same_bytes(before, after):
            raise ProofFailed(f"tensor argument {index} was written to ({native.fill} data)")
    if native.after is not None:
        compare_written(call, native.after, mine, f"{native.fill} data")
        compare_returned(native.outputs, native.after, outputs, mine, f"{native.fill} data")
    inputs = {base.untyped_storage().data_ptr() for base in mine.bases if base is not None}
    returned = {id(value) for value in mine.values} if call.written else set()
    for index, output in enumerate(outputs):
        if (
            isinstance(output, torch.Tensor)
            and output.untyped_storage().data_ptr() in inputs
            and id(output) not in returned
        ):
            raise ProofFailed(f"output {index} shares memory with an argument")
    return outputs, written_statistics(call, mine)


def _force(call: Call, probe: Probe, sample: Sample) -> list[Any]:
    probe.force()
    outputs = call.invoke(sample.values)
    if not probe.forced:
        raise ProofFailed(f"the kernel did not answer: {probe.error or 'no reason given'}")
    return outputs


def _must_leave_to_native(call: Call, probe: Probe, native: Native) -> None:
    probe.force()
    call.invoke(native.sample.clone().values)
    if probe.forced:
        raise ProofFailed(f"it answers what it must leave to native ({native.fill} data)")


def _compare_in_inference_mode(call: Call, probe: Probe, native: Native) -> None:
    where = "inference mode"
    pairs = [(native.sample.clone(), native.sample.clone())] if call.written else []
    with torch.inference_mode():
        pairs.append((native.sample.clone(), native.sample.clone()))
        for natives, mine in pairs:
            expected = call.invoke(natives.values)
            actual = _force(call, probe, mine)
            compare_metadata(expected, actual, where)
            if call.written:
                compare_written(call, natives, mine, where)
                compare_returned(expected, natives, actual, mine, where)
