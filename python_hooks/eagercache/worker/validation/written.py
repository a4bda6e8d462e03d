"""What a call leaves of the arguments that it writes, as native leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import NotBitwise, ProofFailed, same_bits
from eagercache.calls.samples import Sample
from eagercache.worker.validation.metadata import version_of
from eagercache.worker.validation.native import tensors_at

# Operators that write running statistics of the process's own data. No other replica is to hold the
# same bits, so that the statistics may be as accurate as an output. On CUDA only: on CPU no kernel
# that is not bitwise was seen to win.
STATISTICS_ON_CUDA = frozenset({"aten::native_batch_norm"})


def writes_statistics(call: Call) -> bool:
    """Whether what ``call`` writes may differ from native's as an output may."""
    return call.name in STATISTICS_ON_CUDA and any(
        s.device.startswith("cuda") for s in call.tensors
    )


def must_be_bitwise(call: Call) -> bool:
    """Whether no kernel but a bitwise one may write what ``call`` writes."""
    return bool(call.written) and not writes_statistics(call)


def written_statistics(call: Call, sample: Sample | None) -> list[torch.Tensor]:
    """What of a sample is compared as outputs are."""
    return tensors_at(sample, call.written) if writes_statistics(call) else []


WRITES = "and the operator writes its arguments"


def compare_written(call: Call, native: Sample, mine: Sample, where: str) -> None:
    """What both sides left of the arguments: values, the memory around them, version counters."""
    for index, (expected, actual) in enumerate(zip(native.values, mine.values, strict=True)):
        if version_of(expected) != version_of(actual):
            raise ProofFailed(
                f"tensor argument {index}: version {version_of(actual)}, native leaves "
                f"{version_of(expected)} ({where})"
            )
    for index in sorted(call.written):
        expected, actual = native.values[index], mine.values[index]
        if (
            isinstance(expected, torch.Tensor)
            and isinstance(actual, torch.Tensor)
            and not writes_statistics(call)
            and not same_bits(expected, actual)
        ):
            raise NotBitwise(f"not bitwise ({where}), {WRITES}")
        before, after = native.bases[index], mine.bases[index]
        if before is None or after is None or not isinstance(actual, torch.Tensor):
            continue
        around = after.clone()
        around.as_strided(actual.size(), actual.stride(), actual.storage_offset()).copy_(expected)
        if not same_bits(before, around):
            raise ProofFailed(f"memory beside tensor argument {index} was written to ({where})")


def compare_returned(
    expected: Sequence[Any], native: Sample, actual: Sequence[Any], mine: Sample, where: str
) -> None:
    """Where native hands back an argument, the kernel's call must hand back the very same."""
    if _positions(expected, native.values) != _positions(actual, mine.values):
        raise ProofFailed(f"another argument is returned than by native ({where})")


def _positions(outputs: Sequence[Any], values: Sequence[Any]) -> list[int | None]:
    places = {id(value): index for index, value in enumerate(values)}
    return [places.get(id(output)) for output in outputs]
