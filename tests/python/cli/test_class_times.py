"""What a report says of calls that a kernel for many sizes, or for many numbers, answered."""

from __future__ import annotations

from typing import Any

import pytest
from eagercache.cli.reports.class_times import kernel_of_class, kernels_of_classes
from eagercache.frontend.report import KernelInfo

pytestmark = pytest.mark.once


def described(*sizes: int, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    tensor = {"name": "self", "kind": "tensor", "dtype": dtype, "sizes": list(sizes)}
    return {
        **{"op": "aten::var", "overload": "correction", "dispatch_key": "CPU"},
        "args": [tensor, {"name": "n", "kind": "int", "value": 1}],
        **more,
    }


def kernel(*sizes: int, form: str = "shapes", timings: str = "", **more: Any) -> KernelInfo:
    facts = {"form": form, "timings": timings}
    values: dict[str, Any] = {
        **{"op": "aten::var", "overload": "correction", "dispatch_key": "CPU", "digest": "d"},
        **{"call": described(*sizes), "decision": "kernel", "reason": "", "numerics": "accurate"},
        **{"native_ns": 1000.0, "kernel_ns": 500.0, "facts": facts},
    }
    return KernelInfo(**{**values, **more})


TIMINGS = "10x10: 1000 500 0.5..0.5; 2x5: 200 190 0.9..1.0 slower; 100x10: 10000 2000 0.2..0.2"


def best_of(row: dict[str, Any], kernels: list[KernelInfo]) -> Any:
    return kernel_of_class(row, kernels_of_classes(kernels))


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ((10, 10), (1000, 500)),
        ((10, 1), (200, 190)),
        ((2, 2), (200, 190)),  # smaller than all: the cost of a call
        ((10, 55), (5500, 1250)),  # half way
        ((200, 10), (20000, 4000)),  # in proportion
    ],
)
def test_times_lie_between_those_that_were_measured(
    sizes: tuple[int, ...], times: tuple[float, float]
) -> None:
    found = best_of(described(*sizes), [kernel(10, 10, timings=TIMINGS)])
    assert found is not None and found[1:] == pytest.approx(times)


def test_a_class_has_one_dtype_rank_and_operator() -> None:
    one = kernel(10, 10, timings=TIMINGS)
    assert best_of(described(10, 10, dtype="float64"), [one]) is None
    assert best_of(described(10, 10, 10), [one]) is None
    assert best_of(described(10, 10, op="aten::std"), [one]) is None
    assert best_of(described(10, 10), [kernel(10, 10, form="bare")]) is None
    assert best_of(described(10, 10), [kernel(10, 10, decision="native")]) is None


def test_the_nearest_of_several_is_taken_and_damaged_timings_are_none() -> None:
    other = kernel(1000, 1000, timings="not a line; 3xx: 1 2", native_ns=9.0, kernel_ns=3.0)
    found = best_of(described(900, 1000), [kernel(10, 10, timings=TIMINGS), other])
    assert found is not None and found[0] is other and found[1:] == (9.0, 3.0)


def test_a_kernel_for_many_numbers_takes_as_long_for_each() -> None:
    found = best_of(described(10, 10), [kernel(10, 10, form="scalars")])
    assert found is not None and found[1:] == (1000.0, 500.0)
