"""How far a kernel's numbers may be from native's, and by what reference that is measured."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from eagercache.calls import numerics
from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed, Tolerance, compare_with_reference
from eagercache.calls.samples import FILLS, Sample
from eagercache.worker.samples.draws import SEED
from eagercache.worker.validation.accuracy import _squares_overflow, compare_values
from eagercache.worker.validation.native import Native
from eagercache.worker.validation.tolerances import tolerance_of
from test_calls import NONE, boolean, describe, integer, integers, tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_counted_in_units_of_the_last_place(dtype: torch.dtype) -> None:
    exact = torch.tensor([1.0, 3.0, 1000.0, torch.finfo(dtype).smallest_normal / 2], dtype=dtype)
    infinity = torch.full_like(exact, math.inf)
    up = torch.nextafter(exact.float(), infinity.float()) if dtype == torch.float32 else None
    if up is None:
        up = (exact.view(torch.int16) + 1).view(dtype)
    found = compare_with_reference(exact, up, exact.double(), Tolerance(), "here")
    assert found == (1.0, 0.0)


def test_a_half_precision_element_two_units_off_is_refused() -> None:
    exact = torch.linspace(1, 2, 1000).bfloat16()
    off = exact.clone()
    off[5] = (exact[5:6].view(torch.int16) + 2).view(torch.bfloat16)[0]
    with pytest.raises(ProofFailed, match="error of 2 ulp, 1 allowed"):
        compare_with_reference(exact, off, exact.double(), Tolerance(), "here")


LARGEST = torch.finfo(torch.float32).max
UNDER = LARGEST * (1 - 2.0**-23)  # two last places below
OVERFLOWED = "NaN or infinity on one side alone"


@pytest.mark.parametrize(
    ("native", "mine", "exact", "refused"),
    [
        (math.inf, LARGEST, LARGEST, None),
        (-math.inf, -LARGEST, -LARGEST, None),
        (math.inf, 2.0, 2.0, None),
        (math.inf, UNDER, LARGEST, "error of"),
        (math.inf, -LARGEST, LARGEST, "error of"),
        (math.inf, LARGEST, LARGEST * (1 + 2.0**-24), OVERFLOWED),  # rounds to infinity
        (math.inf, LARGEST, math.inf, OVERFLOWED),
        (math.inf, LARGEST, math.nan, OVERFLOWED),
        (math.inf, math.nan, LARGEST, OVERFLOWED),
        (math.inf, -math.inf, LARGEST, OVERFLOWED),
        (math.nan, LARGEST, LARGEST, OVERFLOWED),
        (math.nan, math.inf, math.inf, None),
        (math.nan, -math.inf, math.inf, OVERFLOWED),
        (math.nan, math.inf, 1e39, OVERFLOWED),
        (math.inf, math.nan, math.inf, OVERFLOWED),
        (LARGEST, math.inf, LARGEST, OVERFLOWED),
        (LARGEST, math.inf, 1e39, OVERFLOWED),  # nan_to_num of an infinity is such a reference
    ],
)
def test_what_the_reference_has_passes_for_what_native_lost_to_overflow(
    native: float, mine: float, exact: float, refused: str | None
) -> None:
    # What native errs by elsewhere is no excuse there.
    natives, mines = torch.tensor([native, 1 + 2.0**-20]), torch.tensor([mine, 1.0])
    reference = torch.tensor([exact, 1.0], dtype=torch.float64)
    with pytest.raises(ProofFailed, match=refused) if refused else nullcontext():
        found = compare_with_reference(natives, mines, reference, Tolerance(), "here")
        assert found == (0.0, 8.0)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_what_is_compared_in_parts_is_judged_as_a_whole(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagercache.calls.numerics._AT_ONCE", at_once)
    exact = torch.linspace(1, 2, 8).view(2, 4).t()  # not contiguous
    native, mine = exact.clone(), exact.clone()
    native[0, 0] += 2.0**-20  # eight units: what the kernel may err by elsewhere
    mine[1, 1] += 2.0**-20
    terms = torch.ones_like(exact)
    for magnitude in (None, terms):
        found = compare_with_reference(native, mine, exact.double(), Tolerance(), "here", magnitude)
        assert found == (8.0, 8.0)
    with pytest.raises(ProofFailed, match="error of 8 ulp, 1 allowed"):
        compare_with_reference(exact, mine, exact.double(), Tolerance(), "here")
    mine[2, 1] = math.nan
    with pytest.raises(ProofFailed, match=OVERFLOWED):
        compare_with_reference(native, mine, exact.double(), Tolerance(), "here")


def test_a_reduction_may_err_by_the_logarithm_of_its_length() -> None:
    call = Call(describe("var.correction", tensor((16, 4096)), integers(-1), NONE, boolean(False)))
    outputs = [torch.zeros(16)]
    assert tolerance_of(call, outputs, reduces=False) == Tolerance()
    tolerance = tolerance_of(call, outputs, reduces=True)
    assert tolerance.bound(0.5, torch.float32) == 12.0
    assert tolerance.bound(10.0, torch.float32) == 20.0
    assert tolerance.bound(0.5, torch.bfloat16) == 1.0
    assert Tolerance().bound(10.0, torch.float32) == 20.0


def test_a_sum_that_cancels_is_measured_by_the_size_of_its_terms() -> None:
    reference = torch.tensor([1e-6], dtype=torch.float64)
    native, mine = torch.tensor([1e-6]), torch.tensor([1.1e-6])
    tolerance = Tolerance(ulps=4.0, reduces=True)
    with pytest.raises(ProofFailed, match="4 allowed"):
        compare_with_reference(native, mine, reference, tolerance, "here")
    terms = torch.tensor([100.0], dtype=torch.float64)
    error, _ = compare_with_reference(native, mine, reference, tolerance, "here", terms)
    assert error < 1


def test_terms_of_both_signs_are_measured_whatever_those_of_absolute_operands_are() -> None:
    how = integer(numerics.MEAN)
    sizes = (2, 3, 4)
    call = Call(
        describe("binary_cross_entropy_with_logits", tensor(sizes), tensor(sizes), NONE, NONE, how)
    )
    x = torch.ones(sizes)
    x[0, 0] = torch.tensor([-5.101996898651123, 2.5165178775787354, -2.747300148010254, -5.1633773])
    x[0, 1, :2], x[0, 2, 3] = 0.0, 0.0
    y = torch.tensor([1.0, -2.0, 3.0] * 8).reshape(sizes)
    sample = Sample([x, y], [x.flatten(), y.flatten()])
    (native,) = call.invoke(sample.values)
    exact = torch.nn.functional.binary_cross_entropy_with_logits(x.double(), y.double())
    answer = Native("program", 1, sample, [native], None)
    tolerance = tolerance_of(call, [native], reduces=True)

    def error_of(ulps: int) -> float:
        mine = torch.tensor(float(exact) + ulps * 2**-23)
        return compare_values(call, answer, [native], [mine], tolerance)[0]

    # The answer is 1.73; the terms' magnitudes have a mean of 2.44, whose last place is the next.
    assert 2 < error_of(5) < 3
    with pytest.raises(ProofFailed, match=r"4\.58 allowed"):
        error_of(10)


def test_what_is_neither_sum_nor_mean_of_the_terms_says_nothing_of_their_size() -> None:
    terms = torch.tensor([3.0, -1.0, -1.0], dtype=torch.float64)
    assert numerics.size_of_terms(terms.sum(), terms) == 5.0
    assert numerics.size_of_terms(terms.mean(), terms) == pytest.approx(5 / 3)
    weighted = (terms * 0.75).sum()
    assert numerics.size_of_terms(weighted, terms) == 0.0
    assert numerics.size_of_terms(terms[0], terms[0]) == 0.0
    assert numerics.size_of_terms(terms.sum() * math.inf, terms * math.inf) == 0.0


@pytest.mark.parametrize("reduces", [True, False])
def test_the_infinity_of_a_sum_passes_for_the_nan_of_a_running_mean(reduces: bool) -> None:
    call = Call(describe("mean.dim", tensor((4, 8)), integers(-1), boolean(False), NONE))
    values = torch.ones(4, 8)
    values[1, 2] = math.inf
    sample = Sample([values], [values])
    exact = values.mean(-1)
    running = torch.where(torch.isinf(exact), math.nan, exact)
    tolerance = Tolerance(reduces=reduces)
    native = Native("special", 1, sample, [running], None)
    # Without a reduction it passes where it is the reference's, as here.
    found = compare_values(call, native, native.outputs, [exact], tolerance)
    assert found == (0.0, 0.0)
    with pytest.raises(ProofFailed, match="NaN or infinity"):  # the reverse never passes
        reverse = Native("special", 1, sample, [exact], None)
        compare_values(call, reverse, reverse.outputs, [running], tolerance)


def test_memory_that_ran_out_says_nothing_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    call = Call(describe("tanh", tensor((4, 8))))
    values = torch.ones(4, 8)
    answer = Native("unit", 1, Sample([values], [values]), [values.tanh()], None)
    monkeypatch.setattr(Call, "invoke", invoke)
    with pytest.raises(torch.OutOfMemoryError):
        compare_values(call, answer, answer.outputs, [values], Tolerance())


@pytest.mark.parametrize("second", [-math.inf, 1.0])
def test_nan_passes_for_natives_infinity_where_the_reference_has_it_too(second: float) -> None:
    call = Call(describe("mean.dim", tensor((4, 8)), integers(-1), boolean(False), NONE))
    values = torch.ones(4, 8)
    values[1, 2], values[1, 3] = math.inf, second
    sample = Sample([values], [values])
    native = Native("special", 1, sample, [torch.tensor([1, -math.inf, 1, 1])], None)
    mine = [torch.tensor([1, math.nan, 1, 1])]
    tolerance = Tolerance(reduces=True)
    if second < 0:
        assert compare_values(call, native, native.outputs, mine, tolerance) == (0.0, 0.0)
    else:  # the mean is infinite
        with pytest.raises(ProofFailed, match="-inf native, nan here"):
            compare_values(call, native, native.outputs, mine, tolerance)


def test_data_whose_squares_overflow_are_found() -> None:
    call = Call(describe("var.correction", tensor((16, 4096)), integers(-1), NONE, boolean(False)))
    overflowing = {fill for fill in FILLS if _squares_overflow(call.sample(fill, SEED))}
    assert "extreme" in overflowing
    assert not overflowing & {"normal", "unit", "integers", "ones", "zeros"}
