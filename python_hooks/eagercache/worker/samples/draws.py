"""Which samples a proof needs beside the usual ones, and what equal bits on them show.

What two ways of computing differ in may meet few elements: another rounding in one of thousands, a
pair of special values, numbers that all round to the same side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import base_name
from eagercache.calls.samples import ALIKE, ALL_SPECIAL, FILLS

SEED = 20_240_601

# On few elements another rounding (a fused multiplication and addition, an approximate root) may
# hide, or a pair of special values may not occur, and "bitwise", or a small error, would be luck.
# So small calls are made again until the smallest tensor that they make or write has had this many
# elements, or this many times, within this many elements of arguments.
BITWISE_ELEMENTS = 2048
MOST_ROUNDS = 256
MOST_ROUND_ELEMENTS = 1 << 18
# A kernel of many sizes is proved on some dozens of calls, which share these rounds: but each, with
# loops and ends of loops of its own, has so many.
LEAST_ROUNDS = 20
EXTRA_FILLS = ("normal", "unit", "wide", "cancelling", "special", "zeros")

# Native takes so many float32 at once, in two vectors of AVX-512, and no fewer to a thread of its
# own (at::internal::GRAIN_SIZE).
ELEMENTS_AT_ONCE = 32
ELEMENTS_OF_A_THREAD = 32768

# Sums whose terms are the arguments' elements. A long one of numbers that are much alike, added up
# one after the other, is off by a share of their count, which random numbers do not show.
_PLAIN_SUMS = frozenset({
    "sum", "mean", "nansum", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
})  # fmt: skip
ALIKE_DRAWS = 12
# Of two arguments' special values each pair is one of some 170.
SPECIAL_ELEMENTS = 1024
MOST_SPECIAL_DRAWS = 64


def extra_draws(call: Call, made: Sequence[torch.Tensor], others: int) -> Iterator[tuple[str, int]]:
    """(fill, seed) of the samples that show whether a small call is bitwise by more than luck.

    ``made``: what it gives and writes. The kernel is proved on ``others`` calls beside this one,
    which have their share of them.
    """
    counts = [tensor.numel() for tensor in made]
    # Of an expanded argument only so many numbers are different ones.
    counts.append(max((spec.extent for spec in call.tensors), default=BITWISE_ELEMENTS))
    smallest = max(min(counts), 1)
    rounds = min(MOST_ROUNDS, BITWISE_ELEMENTS // smallest, MOST_ROUND_ELEMENTS // _taken(call))
    least = min(rounds, LEAST_ROUNDS)
    for index in range(max(least, -(-rounds // (1 + others)))):
        yield EXTRA_FILLS[index % len(EXTRA_FILLS)], SEED + len(FILLS) + index


def telling_draws(call: Call, *, reduces: bool, others: int) -> Iterator[tuple[str, int]]:
    """(fill, seed) of the samples that show how sums are made, and what becomes of special values.

    A negative zero beside a one decides of a sign, an infinity beside the largest number of whether
    something overflows on the way.
    """
    most = max(MOST_ROUND_ELEMENTS // _taken(call), 1)
    first = SEED + len(FILLS) + MOST_ROUNDS
    if base_name(call) in _PLAIN_SUMS:
        for index in range(min(most, -(-ALIKE_DRAWS // (1 + others)))):
            yield ALIKE, first + index
    elif not reduces and len(call.tensors) > 1 and _has_floats(call):
        smallest = max(min(spec.extent for spec in call.tensors), 1)
        rounds = min(MOST_SPECIAL_DRAWS, -(-SPECIAL_ELEMENTS // smallest), most)
        for index in range(-(-rounds // (1 + others))):
            yield ALL_SPECIAL, first + index


def _has_floats(call: Call) -> bool:
    return any(spec.dtype.is_floating_point for spec in call.tensors)


def _taken(call: Call) -> int:
    return max(sum(spec.numel for spec in call.tensors), 1)


def computes_alike(call: Call, made: Sequence[torch.Tensor], *, reduces: bool, others: int) -> bool:
    """Whether equal bits show that a kernel computes functions (exp, log, pow) as native does.

    Native has one way for whole vectors, by twos, another one for what is left and for strided
    elements, and the kernel's ways need not meet at the same elements. Two ways differ in one
    answer of thousands, so that draws tell little of the few elements that are left. Where all are
    in vectors and there are many, equal bits are no luck. On CUDA each element is alone.
    """
    if any(spec.device != "cpu" for spec in call.tensors):
        return True
    if reduces or others or not made:
        return False
    count = made[0].numel()
    return (
        BITWISE_ELEMENTS <= count <= ELEMENTS_OF_A_THREAD
        and count % ELEMENTS_AT_ONCE == 0
        and all(tensor.numel() == count for tensor in made)
        and all(
            spec.wrapped or (spec.numel == spec.extent == count and spec.dtype.itemsize >= 4)
            for spec in call.tensors
        )
    )
