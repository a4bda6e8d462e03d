"""The calls that one kernel with symbolic sizes is to answer, and which of them it is tried on."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eagercache.calls.call import Call
from eagercache.calls.description import CallError

SMALLEST = 2  # a size of 1 broadcasts: calls with one are of another class
_MAX_PROOF_ELEMENTS = 1 << 20


class ShapeFamily:
    """The members of a shape pattern: a call, and all that differ from it in the symbols only.

    ``pattern`` is the hook's (dispatcher/plans/shape_plan.h). Raises CallError when it is not one
    of the call's.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._description = description
        self.pattern: Mapping[str, Any] = description["pattern"]
        self.call = Call(description)
        self.symbols = [(int(tensor), int(dim)) for _, tensor, dim in self.pattern["symbols"]]
        self.ties = [
            (int(symbol), int(argument), int(element))
            for _, symbol, argument, element in self.pattern["ties"]
        ]
        try:
            self.values = tuple(self.call.tensors[t].sizes[d] for t, d in self.symbols)
        except IndexError as error:
            raise CallError("the pattern names a size that there is not") from error

    @property
    def has_open_strides(self) -> bool:
        """Whether members may differ in strides that sizes do not say; see `_resize`."""
        return any(
            size == 1 and stride not in _steps(spec.sizes, spec.strides)
            for spec in self.call.tensors
            for size, stride in zip(spec.sizes, spec.strides, strict=True)
        )

    def member(self, values: Sequence[int], further: int = 0) -> Call:
        """The call whose symbols have these values, its open strides by so much larger."""
        description = copy.deepcopy(dict(self._description))
        by_tensor: dict[int, dict[int, int]] = {}
        for (tensor, dimension), value in zip(self.symbols, values, strict=True):
            by_tensor.setdefault(tensor, {})[dimension] = value
        for index, argument in enumerate(_tensors(description["args"])):
            if index in by_tensor or further:
                _resize(argument, by_tensor.get(index, {}), further)
        for symbol, argument_index, element in self.ties:
            argument = description["args"][argument_index]
            if argument["kind"] == "int_list":
                argument["values"][element] = values[symbol]
            elif argument["kind"] == "int":
                argument["value"] = values[symbol]
            else:
                raise CallError("the pattern ties something that is no integer")
        if tuple(values) != self.values:
            description.pop("integers", None)  # in range for the call's own sizes alone
        return Call(description)

    def symbolic(self) -> Call:
        """The call with its tied integers left open: they follow the tensors in `Call.bind`."""
        return self.call.with_open_integers(
            [(argument, element) for _, argument, element in self.ties]
        )

    @property
    def tied_sizes(self) -> list[tuple[int, int]]:
        """(tensor, dimension) of the symbol that each tied integer equals."""
        return [self.symbols[symbol] for symbol, _, _ in self.ties]


def _tensors(arguments: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for argument in arguments:
        if argument["kind"] == "tensor":
            yield argument
        elif argument["kind"] == "tensor_list":
            yield from _tensors(argument["elements"])


def _resize(argument: dict[str, Any], sizes: Mapping[int, int], further: int) -> None:
    """Gives a dense tensor other sizes in the same order of its strides.

    A stride of a dimension of size 1 stays what it is to the others (guards/key/shape_class.h):
    equal to one of them, or past all elements. Those that are past them are ``further`` away.
    """
    old, strides = argument["sizes"], argument["strides"]
    new = [sizes.get(dimension, size) for dimension, size in enumerate(old)]
    before, after = _steps(old, strides), _steps(old, strides, new)
    became = dict(zip(before, after, strict=True))
    apart = further + after[-1] - before[-1]
    argument["sizes"] = new
    argument["strides"] = [
        became.get(stride, stride + apart if size == 1 else stride)
        for size, stride in zip(old, strides, strict=True)
    ]


def _steps(
    sizes: Sequence[int], strides: Sequence[int], others: Sequence[int] | None = None
) -> list[int]:
    """What strides a dense tensor has, from the inside out, and last the number of its elements.

    Of a tensor of the sizes ``others`` in the same order of the strides, where they are given.
    """
    wide = [d for d in range(len(sizes)) if sizes[d] != 1 and strides[d] != 0]
    steps = [1]
    for dimension in sorted(wide, key=lambda dimension: strides[dimension]):
        steps.append(steps[-1] * (sizes if others is None else others)[dimension])
    return steps


def elements_of(call: Call, outputs: Sequence[Any]) -> int:
    """Elements of the call's largest tensor, as the hook counts them."""
    return max(
        [spec.numel for spec in call.tensors] + [output.numel() for output in outputs], default=1
    )


def groups(values: Sequence[int], admits: Callable[[Sequence[int]], bool]) -> list[list[int]]:
    """Symbols that can only change together, by index; those that cannot change at all are in none.

    ``values`` are admitted.
    """
    found: list[list[int]] = []
    left = list(range(len(values)))
    while left:
        first = left.pop(0)
        others = [index for index in left if values[index] == values[first]]
        for count in range(len(others) + 1):
            choices = itertools.islice(itertools.combinations(others, count), 64)
            group = next(
                (
                    [first, *chosen]
                    for chosen in choices
                    if any(
                        admits(_with(values, [first, *chosen], v)) for v in _other(values[first])
                    )
                ),
                None,
            )
            if group is not None:
                found.append(group)
                left = [index for index in left if index not in group]
                break
    return found


def _other(value: int) -> list[int]:
    return [value + 1, value - 1, 2 * value, SMALLEST, 16 * value]


def _with(values: Sequence[int], group: Sequence[int], value: int) -> tuple[int, ...]:
    return tuple(value if i in group else v for i, v in enumerate(values))


def proof_values(
    family: ShapeFamily, admits: Callable[[Sequence[int]], bool], vector_lengths: Sequence[int]
) -> list[tuple[int, ...]]:
    """What the kernel is proved on: the call itself, the ends of the guards, and around vectors."""
    own = family.values
    edges = sorted(
        {SMALLEST, SMALLEST + 1}
        | {length + shift for length in vector_lengths for shift in (-1, 0, 1)}
        | {2 * max(vector_lengths) + 3}
    )
    together = groups(own, admits)
    chosen = [own]
    base = own
    for group in together:  # moderate sizes elsewhere, so that the ends are quick to try
        smaller = _with(base, group, min(base[group[0]], 2 * max(vector_lengths) + 3))
        base = smaller if admits(smaller) else base
    for group in together:
        for value in [*edges, *ends(base, group, admits)]:
            chosen.append(_with(base, group, value))
    for value in edges:
        values = base
        for group in together:
            values = _with(values, group, value)
        chosen.append(values)
    return [
        values
        for values in dict.fromkeys(chosen)
        if values == own
        or (
            min(values) >= SMALLEST
            and admits(values)
            and _elements(family, values) <= _MAX_PROOF_ELEMENTS
        )
    ]


def _elements(family: ShapeFamily, values: Sequence[int]) -> int:
    return sum(spec.numel for spec in family.member(values).tensors)


def ends(
    values: Sequence[int], group: Sequence[int], admits: Callable[[Sequence[int]], bool]
) -> tuple[int, int]:
    """The smallest and the largest admitted value of a group, of those that are quick to try.

    ``values`` are admitted, and between them and an end all are.
    """
    own = values[group[0]]
    rest = max(1, math.prod(values) // max(1, math.prod(values[index] for index in group)))
    far = max(own + 1, _MAX_PROOF_ELEMENTS // (4 * rest))

    def end(inside: int, outside: int) -> int:
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            if admits(_with(values, group, middle)):
                inside = middle
            else:
                outside = middle
        return inside

    smallest = end(own, SMALLEST - 1) if own > SMALLEST else own
    # Guards may demand multiples of a few.
    endless = any(admits(_with(values, group, far + shift)) for shift in range(8))
    return smallest, own if endless else end(own, far)


def timing_values(
    family: ShapeFamily, admits: Callable[[Sequence[int]], bool], targets: Sequence[int]
) -> list[tuple[int, ...]]:
    """What the kernel is timed on: the call itself, and calls of about so many elements."""
    own = family.values
    together = groups(own, admits)
    elements = max(spec.numel for spec in family.call.tensors)
    chosen = [own]
    for target in targets:
        ratio = (target / elements) ** (1 / max(1, len(together)))
        values = own
        for group in together:
            scaled = _with(values, group, max(SMALLEST, round(own[group[0]] * ratio)))
            values = scaled if admits(scaled) else values
        chosen.append(values)
    return list(dict.fromkeys(chosen))


def sizes_text(values: Sequence[int]) -> str:
    """Sizes as a person reads them: 4x128; "own" where none is open."""
    return "x".join(map(str, values)) or "own"


def read_sizes(text: str, count: int) -> list[tuple[int, ...]]:
    """The rows of ``count`` sizes in `sizes_text`s with spaces between. Raises ValueError."""
    rows = [() if word == "own" else tuple(map(int, word.split("x"))) for word in text.split()]
    if not rows or any(len(row) != count for row in rows):
        raise ValueError(f"{text[:100]!r} are no rows of {count} sizes")
    return rows
