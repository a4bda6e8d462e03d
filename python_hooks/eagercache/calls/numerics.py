"""When two answers are equal: bit for bit, or within what rounding explains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eagercache.calls.storage import stored_part

if TYPE_CHECKING:
    from eagercache.calls.call import Call

HALF = (torch.float16, torch.bfloat16)
# What float64 leaves of numbers that cancel is below this share of them.
FLOAT64_NOISE = 2.0**-40
# Elements that are compared at a time.
_AT_ONCE = 1 << 25


class ProofFailed(Exception):
    """The kernel is not native's equal. The text is one clause that says where."""


class CannotProve(Exception):
    """No comparison could be made. ``str()`` says why; the kernel says nothing about it."""


class NotBitwise(ProofFailed):
    """A call that writes its arguments, whose kernel does not do so bit for bit as native does.

    What differs in its last bit stays different, in each replica of a job in another way.
    """


@dataclass(frozen=True)
class Tolerance:
    """What a kernel of the class "accurate" may differ by.

    Attributes:
        ulps: the error that it may have even where native has none; elsewhere twice native's.
        reduces: the kernel accumulates over elements. Errors then count in units of the largest of
            the result, the result for the operands' absolute values, the sum or the mean of the
            magnitudes of a loss's terms (`size_of_terms`), and the root mean square of
            the whole result (of an all-zero one: the largest operand): what is left of a sum that
            cancels tells nothing about the rounding of its terms, its sign of zero included, and a
            normalised element near zero is such a rest. Data whose squares overflow
            float32 are compared only where the exact result is NaN: an overflow on the way depends
            on the order of the terms, and native's accumulator may be wider. Where a term is
            infinite, an infinity passes for native's NaN: a running mean (Welford's) makes NaN of
            inf - inf wherever the infinity is not the last term, a sum keeps the exact infinity.
            And NaN passes for native's infinity where the wider reference is NaN too.
        composed: the operator is a function of several. Of a difference of things that it computed
            nothing of the operands' size tells what rounding there was on the way, so errors count
            in units of no less than what the result moves by (in the root mean square) when every
            operand moves by its last place.
    """

    ulps: float = 1.0
    reduces: bool = False
    composed: bool = False

    def bound(self, native_error: float, dtype: torch.dtype) -> float:
        """The largest error, in ulps of ``dtype``, beside native's ``native_error``."""
        if dtype in HALF:
            # Computed in float32 and rounded once: the order of a sum does not show.
            return max(2 * native_error, 1.0)
        return max(2 * native_error, self.ulps)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal byte for byte; both are contiguous."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN being equal to any other."""
    if a.dtype != b.dtype or a.size() != b.size():
        return False
    if a.is_complex():
        return same_bits(torch.view_as_real(a), torch.view_as_real(b))
    if not a.is_floating_point():
        return torch.equal(a, b)
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((equal | (torch.isnan(a) & torch.isnan(b))).all())


# Bits of the stored significand, and the exponent of the smallest normal number.
FORMATS = {
    torch.float16: (10, -14),
    torch.bfloat16: (7, -126),
    torch.float32: (23, -126),
}


def compare_with_reference(
    expected: torch.Tensor,
    actual: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance,
    where: str,
    magnitude: torch.Tensor | None = None,
) -> tuple[float, float]:
    """Largest errors of ``actual`` and of ``expected`` (native's) against ``reference``.

    Counted element by element, in units of the last place of the result there, or of ``magnitude``
    where that is larger. Raises ProofFailed unless NaN, infinities and signs of zero agree and the
    error is within the tolerance; where native in float32 overflowed on its way to a number within
    the range, the kernel may have that number, and the reference's infinity where native has NaN.
    """
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
        reference = torch.view_as_real(reference.to(torch.complex128))
        magnitude = None
    if reference.size() != expected.size():
        raise ProofFailed(f"the reference has other sizes ({where})")
    if magnitude is not None and magnitude.size() == reference.size():
        sizes = in_parts(magnitude)
    else:
        sizes = itertools.repeat(torch.zeros((), device=reference.device))
    answers = zip(in_parts(expected), in_parts(actual), in_parts(reference), strict=True)
    errors = [
        _errors(native, mine, exact, size, tolerance, where)
        for (native, mine, exact), size in zip(answers, sizes, strict=False)
    ]
    natives, known, overflowed = (_largest(column) for column in zip(*errors, strict=True))
    # Native's infinity excuses nothing: a number in its place may err as beside an exact native.
    for error, excuse in ((known, natives), (overflowed, 0.0)):
        bound = tolerance.bound(excuse, expected.dtype)
        if not error <= bound:
            raise ProofFailed(f"error of {error:.3g} ulp, {bound:.3g} allowed ({where})")
    return max(known, overflowed), natives


def in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of ``tensor`` in order, in parts of which copies in float64 may be made."""
    yield from tensor.reshape(-1).split(_AT_ONCE)


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _errors(
    expected: torch.Tensor,
    actual: torch.Tensor,
    reference: torch.Tensor,
    magnitude: torch.Tensor,
    tolerance: Tolerance,
    where: str,
) -> tuple[float, float, float]:
    """Largest errors of some elements, in ulps: native's, the kernel's, where native overflowed.

    What is made of them in float64 takes many times their own memory.
    """
    # Half precision rounds on the way: its overflows there are native's own.
    in_float32 = expected.dtype == torch.float32
    wide = reference.to(torch.float64)
    # Native left the range on its way to a number that is within it (gelu of the largest one).
    overflowed = torch.isinf(expected) & torch.isfinite(actual) & in_float32
    overflowed &= torch.isfinite(wide) & torch.isfinite(wide.to(expected.dtype))
    # Or lost an infinity on the way to it, in its dtype alone (gelu of infinity is NaN in float32).
    kept = torch.isnan(expected) & torch.isinf(actual) & (actual.to(torch.float64) == wide)
    kept &= in_float32
    _compare_special(expected, actual, overflowed | kept, tolerance, where)
    finite = torch.isfinite(expected)
    known = finite & torch.isfinite(wide)
    if bool((finite & ~known & (expected != actual)).any()):
        raise ProofFailed(f"another value where the reference is not finite ({where})")
    # The magnitude is not finite where the operator has no answer for absolute values.
    size = torch.fmax(wide.abs(), torch.nan_to_num(magnitude.to(torch.float64), 0, 0, 0))

    def largest(answer: torch.Tensor, among: torch.Tensor) -> float:
        if not bool(among.any()):
            return 0.0
        distance = (answer[among].to(torch.float64) - wide[among]).abs()
        return float((distance / _ulp(size[among], expected.dtype)).max())

    return largest(expected, known), largest(actual, known), largest(actual, overflowed)


def _compare_special(
    expected: torch.Tensor,
    actual: torch.Tensor,
    excused: torch.Tensor,
    tolerance: Tolerance,
    where: str,
) -> None:
    """Raises ProofFailed unless NaN and infinities, but where ``excused``, and signs of zero agree.

    The kernel's infinity never passes for native's number, whatever the reference is: that may
    depend on where its dtype's range ends, as what `nan_to_num` makes of an infinity does.
    """
    same_special = excused | (
        (torch.isnan(expected) == torch.isnan(actual))
        & (torch.isposinf(expected) == torch.isposinf(actual))
        & (torch.isneginf(expected) == torch.isneginf(actual))
    )
    if not bool(same_special.all()):
        pair = f"{expected[~same_special][0]:.6g} native, {actual[~same_special][0]:.6g}"
        raise ProofFailed(f"NaN or infinity on one side alone: {pair} here ({where})")
    zero = (expected == 0) & (actual == 0)
    differs = zero & (torch.signbit(expected) != torch.signbit(actual))
    if not tolerance.reduces and bool(differs.any()):
        raise ProofFailed(f"another sign of zero ({where})")


def _ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring ``dtype`` numbers at the magnitude of each float64 value."""
    bits, smallest = FORMATS[dtype]
    exponents = torch.frexp(values).exponent.to(torch.int64) - 1
    exponents = exponents.clamp(min=smallest) - bits
    return torch.ldexp(torch.ones_like(values), exponents)


def move_last_places(
    tensors: Sequence[torch.Tensor], seed: int, rounded_to: torch.dtype | None = None
) -> None:
    """Moves every floating-point number of the tensors by its own last place, up or down.

    Or by one of ``rounded_to``, where that is the coarser dtype.
    """
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                continue
            stored = stored_part(tensor, tensor)
            generator = torch.Generator(tensor.device).manual_seed(seed * 10_007 + number)
            signs = torch.randint(0, 2, stored.size(), generator=generator, device=tensor.device)
            place = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, rounded_to) if dtype)
            step = (signs * 2 - 1).to(tensor.dtype) * place
            stored.copy_(stored * (1 + step))


# What losses call the argument that says whether they add their terms up, and its values that do.
REDUCTION, MEAN, SUM = "reduction", 1, 2


def place_of_reduction(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int | None:
    """Which argument has a call of a loss add its terms up; None where it adds none up."""
    schema = op._schema.arguments
    names = [argument.name for argument in schema]
    if op.namespace != "aten" or REDUCTION not in names:
        return None
    place = names.index(REDUCTION)
    default = kwargs.get(REDUCTION, schema[place].default_value)
    how = args[place] if place < len(args) else default
    return place if how in (MEAN, SUM) else None


def size_of_terms(reference: torch.Tensor, terms: torch.Tensor) -> float:
    """How large the terms are that a loss's ``reference`` in float64 is the sum or the mean of.

    That is the sum or the mean of their magnitudes, by which the error of any order of them is
    bounded; 0 where ``reference`` is neither sum nor mean of them. Absolute values of the operands
    do not tell it: the terms of a cross entropy may be of both signs for them, too.
    """
    if reference.dim() or not terms.dim() or not terms.is_floating_point() or not terms.numel():
        return 0.0
    total, size = float(terms.sum()), float(terms.abs().sum())
    for count in (terms.numel(), 1):
        if abs(total / count - float(reference)) <= FLOAT64_NOISE * size / count:
            return size / count
    return 0.0


# Native accumulates these in double, and a float32 loop over a few numbers is off by places.
_IN_DOUBLE = frozenset({"var", "std", "var_mean", "std_mean"})


def base_name(call: Call) -> str:
    """The operator's name without its overload and, of ATen's own, without its namespace."""
    return call.name.removeprefix("aten::").partition(".")[0]


def in_double(call: Call) -> bool:
    """Whether the operator's kernel accumulates in float64, too, and is rounded at its end."""
    spec = call.tensors[0] if call.tensors else None
    return (
        base_name(call) in _IN_DOUBLE
        and spec is not None
        and (spec.dtype, spec.device) == (torch.float32, "cpu")
        and not call.written
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python, in torch's allocators, or in a kernel's own code."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in ("can't allocate memory", "CUDA out of memory"))


def is_device_error(error: BaseException) -> bool:
    """Whether a GPU reported it. Then every later call of this process fails, whatever it asks."""
    return "CUDA error" in str(error) or "device-side assert" in str(error)
