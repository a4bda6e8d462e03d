"""The search for a faster form of a CUDA kernel.

Each form is generated, tuned by Inductor, and timed against native like the first one. The fastest
that proves equal to native is taken, if it beats the first by more than noise does.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagercache.base.log import event
from eagercache.calls.numerics import is_device_error
from eagercache.worker.cuda.forms import Form
from eagercache.worker.jobs.outcome import Built, forget_locals
from eagercache.worker.timing.cuda_timing import CudaTiming

# Seconds from the first other form until no further one is begun.
BUDGETS = {"quick": 20.0, "deep": 120.0}

# Of a copy's speed: a kernel that is this near has nothing to gain that is worth a search.
NEAR_THE_LIMIT = 0.93
# A kernel that takes less waits for its launch, whatever its form.
LEAST_NS = 10_000.0
# What a form must take less than the first.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Tried:
    """A form's kernel, what it takes, and what identifies it."""

    form: Form
    kernel: Built
    timing: CudaTiming
    identity: str

    @property
    def share(self) -> float:
        """Of native's device time, measured by turns."""
        return self.timing.kernel_device_ns / self.timing.native_device_ns


def is_worth_it(timing: CudaTiming, moved: int, copy_gbps: float) -> bool:
    """Whether another form may save something: of a call that moves so many bytes, if known."""
    if timing.kernel_device_ns < LEAST_NS:
        return False
    return not moved or moved / timing.kernel_device_ns < NEAR_THE_LIMIT * copy_gbps


def search(
    first: Tried,
    forms: Iterable[Form],
    attempt: Callable[[Form, set[str]], Tried | None],
    prove: Callable[[Tried], None],
    budget: float,
) -> Tried:
    """The fastest of ``forms`` that proves, or ``first``.

    ``attempt`` makes and times one, None where its kernel is among the identities that it is given;
    ``prove`` raises where its answers are not native's. Both may refuse.
    """
    known, tried = {first.identity}, []
    end = time.monotonic() + budget
    for form in forms:
        if time.monotonic() > end:
            break
        found = _or_none(form, functools.partial(attempt, form, known))
        if found is not None:
            known.add(found.identity)
            tried.append(found)
    for one in sorted(tried, key=lambda each: each.share):
        if one.share > first.share * (1.0 - LEAST_GAIN):
            break
        if _or_none(one.form, functools.partial(_proved, one, prove)) is not None:
            return one
    return first


def _proved(one: Tried, prove: Callable[[Tried], None]) -> Tried:
    prove(one)
    return one


def _or_none(form: Form, step: Callable[[], Tried | None]) -> Tried | None:
    """What ``step`` gives; None where this form cannot be had, which is no failure of the call."""
    try:
        return step()
    except Exception as error:
        if is_device_error(error):
            raise  # this process can do no more with the GPU
        event(logging.INFO, "form_left", form=form.name, reason=error)
        forget_locals(error)
        return None
