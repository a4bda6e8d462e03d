"""What the integer tensors of a call hold, where data is made up for it.

Indices, class labels and lengths must be in range: for others native raises, or ends the process.
So the hook sends what small integer tensors of the real call held, and some values of large ones
(dispatcher/hook/integer_samples.h). A proof takes these for the sample `OWN`; and arguments that
index, by their names in the schema, are filled with values in the range of the real ones by every
rule, or with what the other arguments make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.calls.storage import extent, stored_part

OWN = "own"  # the fill of the call's own integers; its other tensors are as for "normal"

# Arguments of ATen's operators that hold indices or class labels.
_INDICES = frozenset({"index", "indices", "target", "targets"})
# And those whose values depend on each other: nothing but the call's own will do.
_ORDERED = frozenset({"offsets", "offset2bag", "lengths", "input_lengths", "target_lengths"})
# Of orthogonal polynomials the degree, to which native counts one by one: so far at most, since the
# 2**50 steps of float64's data would be weeks; on CPU also past what an integer holds, which is no
# degree there. On a GPU such numbers become the largest integer.
_DEGREE = "n"
MOST_STEPS = 1 << 20
# What every tensor of two rows and columns can be indexed by, where neither values nor rows are
# known. (Values are not on a GPU, where native's kernels assert, which ends the worker's context.)
_SMALLEST_RANGE = (0, 2)

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# Operators that take the indices which another one made of the same tensor, each within a window of
# its own: the name of the argument, and what makes them of the operator's positional arguments.
_DERIVED: Mapping[str, tuple[str, Callable[[Sequence[Any]], torch.Tensor]]] = {
    "aten::max_pool2d_with_indices_backward": (
        "indices",
        lambda args: torch.ops.aten.max_pool2d_with_indices(*args[1:7])[1],
    ),
}


@dataclass(frozen=True)
class IntegerValues:
    """What one integer tensor of the call held."""

    values: torch.Tensor  # one-dimensional, int64, not empty
    whole: bool  # all elements in row-major order; else some of them

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest value, and one more than the largest."""
        return int(self.values.min()), int(self.values.max()) + 1

    def put(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fills ``tensor`` with the values: each in its place, or else drawn from them."""
        if self.whole and self.values.numel() == tensor.numel():
            source = stored_part(self.values.view(tensor.size()), tensor)
            target = stored_part(tensor, tensor)
            if not _overlaps(target):
                target.copy_(source)
                return
        memory = flat_memory(tensor)
        place = {"generator": generator, "device": memory.device}
        chosen = torch.randint(0, self.values.numel(), memory.size(), **place)
        memory.copy_(self.values.to(memory.device)[chosen])


def read_integers(description: Mapping[str, Any]) -> dict[int, IntegerValues]:
    """What a description says of the call's integer tensors, by their places among its tensors."""
    return {
        int(sample["tensor"]): IntegerValues(
            torch.tensor(sample["values"], dtype=torch.int64), bool(sample["whole"])
        )
        for sample in description.get("integers", ())
        if sample["values"]
    }


def derive(name: str, op: torch._ops.OpOverload, args: Sequence[Any]) -> torch.Tensor | None:
    """Makes the argument that follows from the others, where there is one, and returns it.

    ``args`` are the call's positional arguments. Raises what the operator raises that makes it.
    """
    if name not in _DERIVED:
        return None
    argument, make = _DERIVED[name]
    place = [each.name for each in op._schema.arguments].index(argument)
    target: torch.Tensor = args[place]
    target.copy_(make(args))
    return target


def known_ranges(description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same with no more than the ends of each range: what may be kept."""
    return [
        {"tensor": index, "whole": False, "values": [known.bounds[0], known.bounds[1] - 1]}
        for index, known in read_integers(description).items()
    ]


def index_bounds(
    op: torch._ops.OpOverload,
    tensors: Mapping[str, Sequence[tuple[int, torch.dtype]]],
    known: Mapping[int, IntegerValues],
    rows: int | None = None,
) -> dict[int, tuple[int, int]]:
    """From which number to below which the tensors are filled that the operator indexes by.

    ``tensors`` has the places and dtypes of each argument's tensors, by the argument's name.
    ``rows`` is how many there are of what an argument "index" tells one of, where that is known.
    """
    if op.namespace != "aten":
        return {}

    def unknown(name: str) -> tuple[int, int]:
        return (0, max(rows, 1)) if name == "index" and rows is not None else _SMALLEST_RANGE

    return {
        place: known[place].bounds if place in known else unknown(name)
        for name, places in tensors.items()
        if name in _INDICES
        for place, dtype in places
        if dtype in _INTEGERS
    }


def ordered_places(
    op: torch._ops.OpOverload,
    tensors: Mapping[str, Sequence[tuple[int, torch.dtype]]],
    known: Mapping[int, IntegerValues],
) -> Iterator[int]:
    """The places of tensors that only the call's own values, all of them, can be in."""
    for name, places in tensors.items():
        if op.namespace == "aten" and name in _ORDERED:
            yield from (place for place, _ in places if place in known and known[place].whole)


def degree_places(
    op: torch._ops.OpOverload, tensors: Mapping[str, Sequence[tuple[int, torch.dtype]]]
) -> list[int]:
    """The places of tensors up to whose numbers the operator counts."""
    name = op._schema.name
    counts = name.startswith("aten::special_") and "_polynomial_" in name
    return [place for place, _ in tensors.get(_DEGREE, ())] if counts else []


def keep_countable(memory: torch.Tensor, device: str) -> None:
    """Replaces the numbers in ``memory`` that take an operator on ``device`` long to count to."""
    size = memory.to(torch.float64).abs()
    long = size > MOST_STEPS
    if device == "cpu":
        long &= size < 2.0**63
    if bool(long.any()):
        memory.masked_fill_(long, MOST_STEPS)


def put_in_range(tensor: torch.Tensor, bounds: tuple[int, int], generator: torch.Generator) -> None:
    """Fills ``tensor`` with random numbers from the first bound to below the second."""
    memory = flat_memory(tensor)
    place = {"generator": generator, "device": memory.device}
    memory.copy_(torch.randint(*bounds, memory.size(), **place))


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from the first to the last element that ``tensor`` reaches."""
    elements = extent(tensor.size(), tensor.stride())
    return tensor.as_strided((elements,), (1,), tensor.storage_offset())


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one in memory."""
    reach = 0
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted(pairs):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
