"""Times of calls that are answered by the kernel of a class: one for many sizes, or many numbers.

Such a kernel has the verdict of the call that it was made for, and was timed at a few sizes. What
another call of the class takes is estimated between these.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from eagercache.base.operators import described_name, full_name

if TYPE_CHECKING:
    from eagercache.frontend.report import KernelInfo

_SCALARS = ("scalars", "cuda_scalars")
_FORMS = ("shapes", "cuda_shapes", *_SCALARS)


def kernels_of_classes(verdicts: Iterable[KernelInfo]) -> list[KernelInfo]:
    """Those kernels that answer more calls than their own, and were timed."""
    return [
        info
        for info in verdicts
        if info.decision == "kernel"
        and info.facts.get("form") in _FORMS
        and info.native_ns
        and info.kernel_ns
    ]


def kernel_of_class(
    row: Mapping[str, Any], kernels: Iterable[KernelInfo]
) -> tuple[KernelInfo, float, float] | None:
    """The one of `kernels_of_classes` that may have answered a recorded call.

    With native's nanoseconds there, and its own.
    """
    wanted, kinds = (described_name(row), row["dispatch_key"]), _kinds(row)
    found = [
        info
        for info in kernels
        if (full_name((info.op, info.overload)), info.dispatch_key) == wanted
        and _kinds(info.call) == kinds
    ]
    if not found:
        return None
    size = _size(row)
    nearest = min(found, key=lambda info: abs(math.log(_size(info.call) / size)))
    return nearest, *_times(nearest, size)


def _kinds(call: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What all calls of a class have in common, and a little more: numbers may be their own."""
    return [
        (one["kind"], one.get("dtype"), len(one.get("sizes", ()))) for one in call.get("args", ())
    ]


def _size(call: Mapping[str, Any]) -> float:
    sizes = [one["sizes"] for one in call.get("args", ()) if one["kind"] == "tensor"]
    return max([1.0, *(float(math.prod(size)) for size in sizes)])


def _times(info: KernelInfo, size: float) -> tuple[float, float]:
    """Native's and the kernel's, between the timed sizes, or in proportion beyond them."""
    assert info.native_ns is not None
    assert info.kernel_ns is not None
    own = _size(info.call)
    timed = dict(_timings(info.facts.get("timings", ""), own)) or {
        own: (info.native_ns, info.kernel_ns)
    }
    if info.facts.get("form") in _SCALARS:
        return timed.get(own, (info.native_ns, info.kernel_ns))
    sizes = sorted(timed)
    place = bisect(sizes, size)
    if place in (0, len(sizes)):
        edge = sizes[min(place, len(sizes) - 1)]
        # Of a smaller call the cost of calling is the most: it takes as long as the smallest.
        scale = max(1.0, size / edge)
        return timed[edge][0] * scale, timed[edge][1] * scale
    low, high = sizes[place - 1], sizes[place]
    share = (size - low) / (high - low)
    (native_low, kernel_low), (native_high, kernel_high) = timed[low], timed[high]
    return (
        native_low + share * (native_high - native_low),
        kernel_low + share * (kernel_high - kernel_low),
    )


def _timings(text: str, own: float) -> Iterable[tuple[float, tuple[float, float]]]:
    """(elements, (native, kernel)) of lines as "64x256: 11116 10583 ..."; the first is its own."""
    first = 0.0
    for line in text.split("; "):
        with contextlib.suppress(ValueError):  # not a line of times
            sizes, _, rest = line.partition(": ")
            values = float(math.prod(int(size) for size in sizes.split("x")))
            native, kernel = map(float, rest.split()[:2])
            first = first or values
            if first and native > 0 and kernel > 0:
                yield own * values / first, (native, kernel)
