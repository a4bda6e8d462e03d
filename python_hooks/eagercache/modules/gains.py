"""What kernels of whole modules save: by the times measured when they were made."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from eagercache.base.entry_facts import number
from eagercache.modules.stats import ModuleStats

# By the identity of modules that share kernels, and whether gradients are needed: nanoseconds that
# a call of each kernel saves, by the kernel's digest.
_saved: dict[tuple[str, bool], dict[str, float]] = {}


def note_kernel(identity: str, gradients: bool, digest: str, facts: Mapping[str, str]) -> None:
    """A kernel with these facts may answer calls of such modules from now on."""
    native, kernel = number(facts, "native_ns"), number(facts, "kernel_ns")
    if native is not None and kernel is not None:
        _saved.setdefault((identity, gradients), {})[digest] = native - kernel


def seconds_saved(stats: ModuleStats) -> float:
    """An estimate: calls answered by kernels, times what a call saved when it was measured.

    Negative where kernels take longer than the forward. Where a module has several kernels each
    call counts as the mean of them; 0 where none was timed.
    """
    total = 0.0
    calls = {True: stats.training_hits, False: stats.hits - stats.training_hits}
    for gradients, count in calls.items():
        known = list(_saved.get((stats.identity, gradients), {}).values())
        if known:
            total += count * statistics.fmean(known) / 1e9
    return total
