"""The calls that one kernel with numbers as arguments is to answer, and which it is tried on."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.description import CallError

# Numbers for lowering: 1 + n/128 with odd n, times a power of two. Exact in every dtype, so that a
# lowering that rounds them prints them unchanged, and unlike any constant of an operator's own.
_MANTISSAS = tuple(1 + n / 128 for n in range(1, 128, 2))
_SMALL_EXPONENTS = range(-2, -13, -1)
_LARGE_EXPONENTS = range(6)

# What a kernel is proved on, of either side of 1/2: moderate ones, and both ends of what the hook
# calls ordinary (guards/key/scalar_class.cc), by whether half precision is among the dtypes.
_SMALL = (0.1, 0.3, 0.4999, 1e-3)
_LARGE = (0.51, 0.7, 1.7, 33.3)
_ENDS = {False: (2.0**-100 * 1.3, 2.0**100 / 1.3), True: (2.0**-14 * 1.3, 2.0**15 / 1.3)}
_MIXED_DRAWS = 3
_SEED = 20_240_602


class ScalarFamily:
    """The members of a scalar class: a call, and all that differ from it in some numbers only.

    ``class_args`` of the description are the call's arguments with something else in the places of
    these numbers. Raises CallError when they are no such arguments.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._description = description
        self.call = Call(description)
        self._places = list(_places(description["args"], description["class_args"]))
        if not self._places:
            raise CallError("the call has no number that could be an argument")
        self.numbers = tuple(_number(description["args"], place) for place in self._places)

    def member(self, numbers: Sequence[float]) -> Call:
        """The call with these numbers."""
        description = copy.deepcopy(dict(self._description))
        for place, number in zip(self._places, numbers, strict=True):
            bits = int.from_bytes(struct.pack("<d", number), "little")
            _argument(description["args"], place)["bits"] = f"{bits:016x}"
        return Call(description)

    def marks(self, draw: int) -> tuple[float, ...] | None:
        """Numbers that are told apart in generated text; others for each draw, 0 and 1.

        Each has the sign of the call's own and is on its side of 1/2. None when there are too few.
        """
        pools = {
            small: iter([m * 2.0**e for e in exponents for m in _MANTISSAS][draw::2])
            for small, exponents in ((True, _SMALL_EXPONENTS), (False, _LARGE_EXPONENTS))
        }
        marks = [next(pools[abs(number) < 0.5], None) for number in self.numbers]
        if None in marks:
            return None
        return tuple(
            _signed(mark or 0.0, own) for mark, own in zip(marks, self.numbers, strict=True)
        )

    def proof_numbers(self) -> list[tuple[float, ...]]:
        """What the kernel is proved on, the call's own numbers first."""
        half = any(spec.dtype == torch.float16 for spec in self.call.tensors)
        least, most = _ENDS[half]
        sides = {True: (*_SMALL, least), False: (*_LARGE, most)}
        chosen = [self.numbers]
        for index in range(len(sides[True])):
            chosen.append(tuple(_signed(sides[abs(own) < 0.5][index], own) for own in self.numbers))
        if len(self.numbers) > 1:  # in another order than the call's
            generator = random.Random(_SEED)
            for _ in range(_MIXED_DRAWS):
                chosen.append(
                    tuple(_signed(generator.choice(sides[abs(n) < 0.5]), n) for n in self.numbers)
                )
        return list(dict.fromkeys(chosen))


def _signed(magnitude: float, like: float) -> float:
    return -magnitude if like < 0 else magnitude


def _places(
    arguments: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, ...]]:
    """Where a float differs, as indices into nested lists of arguments."""
    if len(arguments) != len(others):
        raise CallError("the class has other arguments than the call")
    for index, (mine, other) in enumerate(zip(arguments, others, strict=True)):
        if mine["kind"] != other["kind"]:
            raise CallError("the class has other arguments than the call")
        if mine["kind"] == "float" and mine["bits"] != other["bits"]:
            yield (index,)
        elif mine["kind"] == "scalar_list":
            for inner in _places(mine["elements"], other["elements"]):
                yield (index, *inner)


def _argument(arguments: Sequence[Any], place: Sequence[int]) -> Any:
    argument = arguments[place[0]]
    return _argument(argument["elements"], place[1:]) if len(place) > 1 else argument


def _number(arguments: Sequence[Any], place: Sequence[int]) -> float:
    bits = int(_argument(arguments, place)["bits"], 16)
    return float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])
