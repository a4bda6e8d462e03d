"""What kernels of whole modules save: by the times measured when they were made."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from eagercache.base.entry_facts import number
from eagercache.modules.stats import ModuleStats

# By the identity of modules that share kernels, and whether gradients are needed: nanoseconds of a
# call by the forward and by each kernel, by the kernel's digest.
_times: dict[tuple[str, bool], dict[str, tuple[float, float]]] = {}


def note_kernel(identity: str, gradients: bool, digest: str, facts: Mapping[str, str]) -> None:
    """A kernel with these facts may answer calls of such modules from now on."""
    native, kernel = number(facts, "native_ns"), number(facts, "kernel_ns")
    if native is not None and kernel is not None:
        _times.setdefault((identity, gradients), {})[digest] = native, kernel


def times(identity: str, gradients: bool) -> tuple[float, float] | None:
    """Nanoseconds of a call (by the forward, by a kernel), as measured when kernels were made.

    Of several kernels, the means; None where none was timed.
    """
    known = list(_times.get((identity, gradients), {}).values())
    if not known:
        return None
    native, kernel = zip(*known, strict=True)
    return statistics.fmean(native), statistics.fmean(kernel)


def seconds_saved(stats: ModuleStats) -> float:
    """An estimate: calls answered by kernels, times what a call saved when it was measured.

    Negative where kernels take longer than the forward.
    """
    by_forward, by_kernels = seconds(stats)
    return by_forward - by_kernels


def seconds(stats: ModuleStats) -> tuple[float, float]:
    """Of the calls answered by kernels: what they would take by the forward, and what they took.

    Where a module has several kernels each call counts as the mean of them; 0 where none was timed.
    """
    by_forward = by_kernels = 0.0
    calls = {True: stats.training_hits, False: stats.hits - stats.training_hits}
    for gradients, count in calls.items():
        known = times(stats.identity, gradients)
        if known is not None:
            by_forward += count * known[0] / 1e9
            by_kernels += count * known[1] / 1e9
    return by_forward, by_kernels
