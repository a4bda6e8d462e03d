"""Data for which native raises: a kernel must not answer it.

Compiled code knows nothing of what native checks on the way: a number that an integer is made of
and that no integer holds (`linspace` between tensors), a fill value past the dtype's range
(`masked_fill`), a probability beyond one. Where a kernel would answer such a call, the operator is
native's for these arguments, whatever it answers for others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed, is_device_error, is_out_of_memory
from eagercache.calls.samples import Sample
from eagercache.worker.timing.timing import Probe

# Tensors of at most so many elements may be numbers that native converts: each value is tried.
FEW_ELEMENTS = 16


class AnswersErrors(ProofFailed):
    """The kernel answers where native raises."""


def must_raise_too(
    call: Call, probe: Probe, good: Sample, rejected: Iterable[tuple[str, int]]
) -> None:
    """Raises AnswersErrors where the probe's kernel answers a call for which native raises.

    Tried are the ``rejected`` samples (fill, seed), which native did not answer, and the ends of
    their range in tensors of few elements on the host. ``good``: a sample that native answers.
    """
    for what, sample in _suspects(call, good, rejected):
        if _native_answers(call, sample):
            continue
        probe.force()
        with contextlib.suppress(Exception):
            call.invoke(sample.clone().values)
        if probe.forced:
            raise AnswersErrors(f"it answers where native raises ({what})")
        # An error above the hook leaves the probe waiting; nobody else's call is to be taken.
        probe.capture()
        call.invoke(good.clone().values)


def _native_answers(call: Call, sample: Sample) -> bool:
    try:
        call.invoke(sample.clone().values)
    except Exception as error:
        if is_out_of_memory(error) or is_device_error(error):
            raise
        return False
    return True


def _suspects(
    call: Call, good: Sample, rejected: Iterable[tuple[str, int]]
) -> Iterator[tuple[str, Sample]]:
    for fill, seed in rejected:
        try:
            yield f"{fill} data", call.sample(fill, seed)
        except RuntimeError:
            continue  # what an argument is made of raises
    # A check on a GPU is an assertion there, which ends the process's work: native itself reads
    # numbers on the host alone.
    on_host = all(spec.device == "cpu" for spec in call.tensors)
    few = [
        index
        for index, spec in enumerate(call.tensors)
        if spec.extent <= FEW_ELEMENTS
        and spec.device == "cpu"
        and (on_host or not spec.sizes)
        and not call.holds_positions(index)
        and (spec.dtype.is_floating_point or not spec.sizes)  # else they may be lengths
    ]
    for name in ("largest", "smallest", "infinity", "NaN") if few else ():
        sample = good.clone()
        changed = False
        for index in few:
            number = _number(name, call.tensors[index].dtype)
            value = sample.values[index]
            if number is None:
                continue
            changed = True
            if isinstance(value, torch.Tensor):
                value.fill_(number)
            else:
                sample.values[index] = number
        if changed:
            yield f"the {name} number of a dtype", sample


def _number(name: str, dtype: torch.dtype) -> float | int | None:
    if dtype == torch.bool or dtype.is_complex:
        return None
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return {"largest": info.max, "smallest": info.min, "infinity": math.inf}.get(name, math.nan)
    limits = torch.iinfo(dtype)
    return {"largest": limits.max, "smallest": limits.min}.get(name)
