"""What native answers to the samples that a kernel is compared on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.description import CallError
from eagercache.calls.numerics import CannotProve, is_device_error, is_out_of_memory, same_bits
from eagercache.calls.samples import FILLS, Sample
from eagercache.calls.texts import first_line
from eagercache.worker.samples.draws import SEED

# Above this many bytes of input only the first fills are tried: each costs a native and a kernel
# run, their copies and comparisons.
LARGE_CALL_BYTES = 64 << 20
FILLS_OF_LARGE_CALLS = 4
MINIMUM_FILLS = 2


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


def native_answers(call: Call) -> list[Native]:
    """Native's answers to the fills that it accepts, at most one per fill.

    Raises CannotProve when it accepts too few, or when its own answers are not repeatable, and
    Reshaped.
    """
    limit = FILLS_OF_LARGE_CALLS if is_large(call) else len(call.fills)
    accepted: list[Native] = []
    last_error = ""
    for fill in call.fills:
        if len(accepted) >= limit:
            break
        seed = seed_of(fill)
        try:
            accepted.append(_native_answer(call, fill, seed))
        except (CallError, Reshaped):
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            last_error = first_line(error, 200)
    if len(accepted) < MINIMUM_FILLS:
        raise CannotProve(f"native raises on made-up data: {last_error}")
    first = accepted[0]
    _check_returns(call, first.outputs)
    given = first.sample.clone()
    answers = [*call.invoke(given.values), *tensors_at(given, call.written)]
    expected = [*first.outputs, *tensors_at(first.after, call.written)]
    if any(not same_bits(a, b) for a, b in zip(expected, answers, strict=True)):
        raise CannotProve("native's own answers differ from run to run")
    return accepted


def is_large(call: Call) -> bool:
    """Whether only the first fills are tried."""
    return sum(spec.extent * spec.dtype.itemsize for spec in call.tensors) > LARGE_CALL_BYTES


def seed_of(fill: str) -> int:
    """The seed that a fill's first sample is drawn with."""
    return SEED + (FILLS.index(fill) if fill in FILLS else -1)


def _native_answer(call: Call, fill: str, seed: int) -> Native:
    sample = call.sample(fill, seed)
    given = sample.clone()
    places = [place_of(value) for value in given.values]
    outputs = call.invoke(given.values)
    if [place_of(value) for value in given.values] != places:
        raise Reshaped("native resizes an argument")
    return Native(fill, seed, sample, outputs, given if call.written else None)


def further_answers(
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


def tensors_at(sample: Sample | None, indices: Iterable[int]) -> list[torch.Tensor]:
    """The arguments of a sample with these numbers that are tensors."""
    values = [sample.values[index] for index in sorted(indices)] if sample is not None else []
    return [value for value in values if isinstance(value, torch.Tensor)]


def place_of(value: Any) -> Any:
    """Where a tensor's memory is and how it is laid out."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.data_ptr(), tuple(value.size()), tuple(value.stride()), value.storage_offset()


def _check_returns(call: Call, outputs: Sequence[Any]) -> None:
    if not outputs and not call.written:
        raise CannotProve("the operator returns nothing")
    for output in outputs:
        if output is None:
            raise CannotProve("native returns an undefined tensor")
        if not isinstance(output, torch.Tensor):
            raise CannotProve("native returns something that is not a tensor")
