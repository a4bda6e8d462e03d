"""Whether a kernel equals native.

Both run the described call in this process: native through the ordinary dispatcher, the kernel
through `_C.Probe`, which lets it answer one call of the hooked operator exactly as a hit would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagercache.calls.call import FILLS, Call, CallError, Sample, Value
from eagercache.calls.numerics import (
    FLOAT64_NOISE,
    FORMATS,
    HALF,
    CannotProve,
    NotBitwise,
    ProofFailed,
    Tolerance,
    base_name,
    compare_with_reference,
    in_double,
    is_device_error,
    is_out_of_memory,
    same_bits,
    same_bytes,
    size_of_terms,
)
from eagercache.worker.samples.draws import SEED, computes_alike, extra_draws, telling_draws
from eagercache.worker.samples.ordinary_operands import is_ordinary
from eagercache.worker.timing.timing import Probe
from eagercache.worker.validation.native_errors import must_raise_too

__all__ = [
    "CannotProve",
    "Native",
    "NotBitwise",
    "Proof",
    "ProofFailed",
    "Reshaped",
    "Tolerance",
    "compare_with_reference",
    "native_answers",
    "prove",
    "same_bits",
]

# Above this many bytes of input only the first fills are tried: each costs a native and a kernel
# run, their copies and comparisons.
LARGE_CALL_BYTES = 64 << 20
FILLS_OF_LARGE_CALLS = 4
MINIMUM_FILLS = 2

# Data that show whether a kernel is bitwise. Terms of any size, and ones that cancel, leave of a
# sum what tells little of its rounding, and more steps than the sum itself (a mean, a square, a
# division) round it: there an accumulating kernel may err by so many times more.
HARD_FILLS = ("wide", "cancelling")
HARD_FACTOR = 4.0


# Operators that add elements up, by the name without its overload. Inductor unrolls short sums, so
# that the text of their kernels does not always show it.
_ACCUMULATING = frozenset({
    "sum", "mean", "nansum", "var", "std", "var_mean", "std_mean", "logsumexp", "norm",
    "linalg_vector_norm", "cumsum", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d",
    "avg_pool3d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "max_pool2d_with_indices_backward",
    "_foreach_norm",
})  # fmt: skip


class Reshaped(Exception):
    """Native gives an argument another size, other strides or other memory."""


@dataclass(frozen=True)
class Native:
    """What native answered for one fill, and what it was asked."""

    fill: str
    seed: int
    sample: Sample
    outputs: list[Any]
    after: Sample | None  # what it was given, as it left it, for a call that writes

    @property
    def bytes(self) -> int:
        """What the sample and the answer take."""
        tensors = [*self.sample.bases, *self.outputs, *(self.after.bases if self.after else ())]
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


@dataclass(frozen=True)
class Proof:
    """The result of `prove`."""

    numerics: str  # "bitwise" or "accurate"
    fills: tuple[str, ...]
    seed: int
    largest_error: float  # ulps of the result, over samples that were not equal bit for bit
    native_error: float  # native's own, the same way


def native_answers(call: Call) -> list[Native]:
    """Native's answers to the fills that it accepts, at most one per fill.

    Raises CannotProve when it accepts too few, or when its own answers are not repeatable, and
    Reshaped.
    """
    limit = FILLS_OF_LARGE_CALLS if _is_large(call) else len(call.fills)
    accepted: list[Native] = []
    last_error = ""
    for fill in call.fills:
        if len(accepted) >= limit:
            break
        seed = _seed_of(fill)
        try:
            accepted.append(_native_answer(call, fill, seed))
        except (CallError, Reshaped):
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            last_error = str(error).splitlines()[0] if str(error) else type(error).__name__
    if len(accepted) < MINIMUM_FILLS:
        raise CannotProve(f"native raises on made-up data: {last_error[:200]}")
    first = accepted[0]
    _check_returns(call, first.outputs)
    given = first.sample.clone()
    answers = [*call.invoke(given.values), *_tensors_at(given, call.written)]
    expected = [*first.outputs, *_tensors_at(first.after, call.written)]
    if any(not same_bits(a, b) for a, b in zip(expected, answers, strict=True)):
        raise CannotProve("native's own answers differ from run to run")
    return accepted


def _is_large(call: Call) -> bool:
    return sum(spec.extent * spec.dtype.itemsize for spec in call.tensors) > LARGE_CALL_BYTES


def _seed_of(fill: str) -> int:
    return SEED + (FILLS.index(fill) if fill in FILLS else -1)


def _native_answer(call: Call, fill: str, seed: int) -> Native:
    sample = call.sample(fill, seed)
    given = sample.clone()
    places = [_place(value) for value in given.values]
    outputs = call.invoke(given.values)
    if [_place(value) for value in given.values] != places:
        raise Reshaped("native resizes an argument")
    return Native(fill, seed, sample, outputs, given if call.written else None)


def _further_answers(
    call: Call, draws: Iterable[tuple[str, int]], rejected: list[tuple[str, int]]
) -> Iterator[Native]:
    """Native's answers to further samples; (fill, seed) of what it does not accept is added."""
    for fill, seed in draws:
        try:
            yield _native_answer(call, fill, seed)
        except Exception as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            rejected.append((fill, seed))


def _tensors_at(sample: Sample | None, indices: Iterable[int]) -> list[torch.Tensor]:
    values = [sample.values[index] for index in sorted(indices)] if sample is not None else []
    return [value for value in values if isinstance(value, torch.Tensor)]


def _place(value: Any) -> Any:
    """Where a tensor's memory is and how it is laid out."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.data_ptr(), tuple(value.size()), tuple(value.stride()), value.storage_offset()


def _version(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


def _check_returns(call: Call, outputs: Sequence[Any]) -> None:
    if not outputs and not call.written:
        raise CannotProve("the operator returns nothing")
    for output in outputs:
        if output is None:
            raise CannotProve("native returns an undefined tensor")
        if not isinstance(output, torch.Tensor):
            raise CannotProve("native returns something that is not a tensor")


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


def accumulates(call: Call) -> bool:
    """Whether the operator adds elements up, whatever its kernel's text looks like."""
    return base_name(call) in _ACCUMULATING


def _rounding_hides_bits(native: Native) -> bool:
    """Whether float32 is rounded to half precision: its last bits show in one of thousands."""
    made = [*native.outputs, *(native.after.values if native.after else ())]
    return any(isinstance(tensor, torch.Tensor) and tensor.dtype in HALF for tensor in made)


def tolerance_of(
    call: Call, outputs: Sequence[torch.Tensor], reduces: bool, composed: bool = False
) -> Tolerance:
    """The tolerance for a kernel that ``reduces`` (accumulates over elements) or does not.

    1 ulp without a reduction. With one over n elements log2(n): the error bound of pairwise
    summation, log2(n) u sum|x| (N. J. Higham, Accuracy and Stability of Numerical Algorithms,
    section 4.2), which is what native's own sum promises. Native may do better on some operators
    (`var` accumulates in double), and a vectorised loop in the operand's own precision cannot.
    """
    sizes = [spec.numel for spec in call.tensors]
    if not (reduces or composed) or not sizes:
        return Tolerance()
    smallest = min((output.numel() for output in outputs), default=1)
    longest = max((max(spec.sizes, default=1) for spec in call.tensors), default=1)
    length = max(max(sizes) // max(smallest, 1), longest, 2)
    if composed:
        # Sums of sums: each adds its own bound, over all dimensions at most that of all elements.
        length = max(*sizes, 2)
    return Tolerance(ulps=max(1.0, math.log2(length)), reduces=True, composed=composed)


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
    numerics = "bitwise"
    by_luck = (reduces or approximates) and _rounding_hides_bits(natives[0])
    made = [*natives[0].outputs, *_tensors_at(natives[0].after, call.written)]
    if calls_functions and not computes_alike(call, made, reduces=reduces, others=others):
        by_luck = True
        if any(tensor.dtype not in FORMATS and not _is_exact(tensor.dtype) for tensor in made):
            raise ProofFailed(f"bitwise by luck at best: a rounded function of {made[0].dtype}")
    if in_double(call) or by_luck:
        if _must_be_bitwise(call):
            rounded = "function" if calls_functions or not reduces else "sum"
            raise NotBitwise(f"bitwise by luck at best: a rounded {rounded}, {_WRITES}")
        numerics = "accurate"
    worst = native_worst = 0.0
    rejected: list[tuple[str, int]] = []
    if not _is_large(call):
        answered = {native.fill for native in natives}
        rejected += [(fill, _seed_of(fill)) for fill in call.fills if fill not in answered]
    telling = _further_answers(call, telling_draws(call, reduces=reduces, others=others), rejected)
    further = _further_answers(call, extra_draws(call, made, others), rejected)
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
        outputs, left = _answer(call, probe, native)
        _compare_metadata(native.outputs, outputs, native.fill)
        if not composed:  # a function's own in-place steps count on what it returns
            _compare_versions(native.outputs, outputs, native.fill)
        outputs += left
        expected = [*native.outputs, *_statistics(call, native.after)]
        if all(same_bits(a, b) for a, b in zip(expected, outputs, strict=True)):
            continue
        if _must_be_bitwise(call):
            raise NotBitwise(f"not bitwise ({native.fill} data), {_WRITES}")
        numerics = "accurate"
        allowed = tolerance
        if tolerance.reduces and native.fill in HARD_FILLS:
            allowed = replace(tolerance, ulps=HARD_FACTOR * tolerance.ulps)
        error, native_error = _compare_values(call, native, expected, outputs, allowed)
        worst, native_worst = max(worst, error), max(native_worst, native_error)
    must_raise_too(call, probe, natives[0].sample, rejected)
    _compare_in_inference_mode(call, probe, natives[0])
    return Proof(
        numerics=numerics,
        fills=tuple(native.fill for native in natives),
        seed=SEED,
        largest_error=worst,
        native_error=native_worst,
    )


# Operators that write running statistics of the process's own data. No other replica is to hold the
# same bits, so that the statistics may be as accurate as an output. On CUDA only: on CPU no kernel
# that is not bitwise was seen to win.
STATISTICS_ON_CUDA = frozenset({"aten::native_batch_norm"})


def writes_statistics(call: Call) -> bool:
    """Whether what ``call`` writes may differ from native's as an output may."""
    return call.name in STATISTICS_ON_CUDA and any(
        s.device.startswith("cuda") for s in call.tensors
    )


def _is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype == torch.complex128)


def _must_be_bitwise(call: Call) -> bool:
    """Whether no kernel but a bitwise one may write what ``call`` writes."""
    return bool(call.written) and not writes_statistics(call)


def _statistics(call: Call, sample: Sample | None) -> list[torch.Tensor]:
    return _tensors_at(sample, call.written) if writes_statistics(call) else []


def _answer(call: Call, probe: Probe, native: Native) -> tuple[list[Any], list[torch.Tensor]]:
    """The kernel's outputs for a copy of the sample, which must come back as native leaves it.

    And the statistics that it left.
    """
    mine = native.sample.clone()
    places = [_place(value) for value in mine.values]
    outputs = _force(call, probe, mine)
    if [_place(value) for value in mine.values] != places:
        raise ProofFailed(f"an argument was moved or resized ({native.fill} data)")
    expected = native.after or native.sample
    for index, (before, after) in enumerate(zip(expected.bases, mine.bases, strict=True)):
        if before is None or after is None or index in call.written:
            continue
        if not same_bytes(before, after):
            raise ProofFailed(f"tensor argument {index} was written to ({native.fill} data)")
    if native.after is not None:
        _compare_written(call, native.after, mine, f"{native.fill} data")
        _compare_returned(native.outputs, native.after, outputs, mine, f"{native.fill} data")
    inputs = {base.untyped_storage().data_ptr() for base in mine.bases if base is not None}
    returned = {id(value) for value in mine.values} if call.written else set()
    for index, output in enumerate(outputs):
        if (
            isinstance(output, torch.Tensor)
            and output.untyped_storage().data_ptr() in inputs
            and id(output) not in returned
        ):
            raise ProofFailed(f"output {index} shares memory with an argument")
    return outputs, _statistics(call, mine)


_WRITES = "and the operator writes its arguments"


def _compare_written(call: Call, native: Sample, mine: Sample, where: str) -> None:
    """What both sides left of the arguments: values, the memory around them, version counters."""
    for index, (expected, actual) in enumerate(zip(native.values, mine.values, strict=True)):
        if _version(expected) != _version(actual):
            raise ProofFailed(
                f"tensor argument {index}: version {_version(actual)}, native leaves "
                f"{_version(expected)} ({where})"
            )
    for index in sorted(call.written):
        expected, actual = native.values[index], mine.values[index]
        if (
            isinstance(expected, torch.Tensor)
            and isinstance(actual, torch.Tensor)
            and not writes_statistics(call)
            and not same_bits(expected, actual)
        ):
            raise NotBitwise(f"not bitwise ({where}), {_WRITES}")
        before, after = native.bases[index], mine.bases[index]
        if before is None or after is None or not isinstance(actual, torch.Tensor):
            continue
        around = after.clone()
        around.as_strided(actual.size(), actual.stride(), actual.storage_offset()).copy_(expected)
        if not same_bits(before, around):
            raise ProofFailed(f"memory beside tensor argument {index} was written to ({where})")


def _compare_returned(
    expected: Sequence[Any], native: Sample, actual: Sequence[Any], mine: Sample, where: str
) -> None:
    """Where native hands back an argument, the kernel's call must hand back the very same."""
    if _positions(expected, native.values) != _positions(actual, mine.values):
        raise ProofFailed(f"another argument is returned than by native ({where})")


def _positions(outputs: Sequence[Any], values: Sequence[Any]) -> list[int | None]:
    places = {id(value): index for index, value in enumerate(values)}
    return [places.get(id(output)) for output in outputs]


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
            _compare_metadata(expected, actual, where)
            if call.written:
                _compare_written(call, natives, mine, where)
                _compare_returned(expected, natives, actual, mine, where)


_METADATA: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = (
    ("dtype", lambda t: t.dtype),
    ("device", lambda t: t.device),
    ("layout", lambda t: t.layout),
    ("sizes", lambda t: tuple(t.size())),
    ("strides", lambda t: tuple(t.stride())),
    ("storage offset", lambda t: t.storage_offset()),
    ("requires_grad", lambda t: t.requires_grad),
    ("is_inference", lambda t: t.is_inference()),
    ("is_conj", lambda t: t.is_conj()),
    ("is_neg", lambda t: t.is_neg()),
)


def _compare_metadata(expected: Sequence[Any], actual: Sequence[Any], where: str) -> None:
    if len(expected) != len(actual):
        raise ProofFailed(f"{len(actual)} outputs, native gives {len(expected)} ({where})")
    for index, (mine, native) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(mine, torch.Tensor):
            raise ProofFailed(f"output {index} is undefined ({where})")
        for name, read in _METADATA:
            if read(mine) != read(native):
                raise ProofFailed(
                    f"output {index}: {name} {read(mine)}, native gives {read(native)} ({where})"
                )
    if _sharing(expected) != _sharing(actual):
        raise ProofFailed(f"the outputs share memory otherwise than native's ({where})")


def _compare_versions(expected: Sequence[Any], actual: Sequence[Any], where: str) -> None:
    versions = [[_version(output) for output in side] for side in (expected, actual)]
    if versions[0] != versions[1]:
        raise ProofFailed(f"version counters {versions[1]}, native gives {versions[0]} ({where})")


def _sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the index of the first one with its memory."""
    pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [pointers.index(pointer) for pointer in pointers]


def _compare_values(
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
        raise ProofFailed(
            f"not equal bit for bit, and there is no wider reference ({native.fill} data)"
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
    if writes_statistics(call):
        outputs += [values[index] for index in sorted(call.written)]
    return outputs


def _magnitudes(
    call: Call, wide: Call, values: Sequence[Any], references: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """How large the terms are that each element of the answers was summed from.

    The answers of ``wide`` for the absolute values of its floating-point tensors, and at least the
    root mean square of the answer itself and what a loss's terms are.
    """
    unreduced = wide.unreduced()
    terms = unreduced.invoke(values) if unreduced is not None else references
    absolute = [
        value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in values
    ]
    largest = max((_largest(value) for value in absolute), default=0.0)
    magnitudes = []
    answers = _invoke(call, wide, absolute)
    for answer, reference, each in zip(answers, references, terms, strict=True):
        if not reference.is_floating_point():
            magnitudes.append(answer)
            continue
        known = reference[torch.isfinite(reference)].to(torch.float64)
        floor = float(known.square().mean().sqrt()) if known.numel() else 0.0
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
            signs = torch.randint(0, 2, value.size(), generator=generator).to(value.device) * 2 - 1
            value = value * (1 + signs * 2.0 ** -FORMATS[spec.dtype][0])
        moved.append(value)
    sizes = []
    for answer, reference in zip(_invoke(call, wide, moved), references, strict=True):
        change = (answer - reference).to(torch.float64)
        known = change[torch.isfinite(change)] if reference.is_floating_point() else change[:0]
        size = float(known.square().mean().sqrt()) if known.numel() else 0.0
        bits = FORMATS.get(_narrowest(call), (23, 0))[0]
        sizes.append(size * 2.0**bits if math.isfinite(size) else 0.0)
    return sizes


def _narrowest(call: Call) -> torch.dtype:
    dtypes = [spec.dtype for spec in call.tensors if spec.dtype in FORMATS]
    return min(dtypes, key=lambda dtype: FORMATS[dtype][0], default=torch.float32)


def _largest(value: Any) -> float:
    """The largest finite magnitude in a floating-point tensor, 0 for anything else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0.0
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _squares_overflow(sample: Sample) -> bool:
    """Whether the sum of the squares of some tensor's finite values is past float32's range."""
    for value in sample.values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            squares = value.to(torch.float64).square()
            if float(squares[torch.isfinite(squares)].sum()) > torch.finfo(torch.float32).max:
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
