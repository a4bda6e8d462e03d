"""Operator calls rebuilt from their descriptions.

A description is what the hook knows of a call (guards/key/call_key.h): the operator, every argument
with its value, and of tensors all but the data; of integer tensors it may say what they held.
`Call` decodes one; `Call.sample` makes tensors of exactly the described metadata and fills them
from a seed; `Call.invoke` calls the operator.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.base.operators import described_name
from eagercache.calls.description import (
    DECODERS,
    CallError,
    TensorSpec,
    decode_state,
    decode_tensor,
    find_operator,
)
from eagercache.calls.integers import (
    OWN,
    degree_places,
    derive,
    index_bounds,
    keep_countable,
    ordered_places,
    put_in_range,
    read_integers,
)
from eagercache.calls.numerics import place_of_reduction
from eagercache.calls.samples import FILLS, Sample, Value, allocate


@dataclass(frozen=True)
class _Slot:
    """Where the tensor of this index stands among the arguments."""

    index: int


def _slots(argument: Any) -> Iterator[int]:
    if isinstance(argument, _Slot):
        yield argument.index
    elif isinstance(argument, list):
        for element in argument:
            yield from _slots(element)


class Call:
    """One described operator call."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        """Raises CallError when an operator, argument or kind is not known here."""
        self.description = dict(description)
        self.name = described_name(description)
        self.op = find_operator(description["op"], description["overload"])
        self.state = decode_state(description)
        self.tensors: list[TensorSpec] = []
        # By tensor, the bounds of the values that it is filled with: it is used as an index.
        self.index_ranges: dict[int, tuple[int, int]] = {}
        self._arguments = [self._decode(argument) for argument in description["args"]]
        schema = self.op._schema.arguments
        if len(schema) != len(self._arguments):
            raise CallError(
                f"{self.name} takes {len(schema)} arguments, the description has "
                f"{len(self._arguments)}"
            )
        self.integers = read_integers(description)
        by_name = {
            argument.name: [(place, self.tensors[place].dtype) for place in _slots(value)]
            for argument, value in zip(schema, self._arguments, strict=True)
        }
        self.index_ranges.update(index_bounds(self.op, by_name, self.integers, self._rows()))
        self._ordered = frozenset(ordered_places(self.op, by_name, self.integers))
        self._degrees = frozenset(degree_places(self.op, by_name))

    def _rows(self) -> int | None:
        """The size of the dimension ``dim`` of ``self``, without one the number of its elements."""
        names = [argument.name for argument in self.op._schema.arguments]
        named = dict(zip(names, self._arguments, strict=True))
        slot, dim = named.get("self"), named.get("dim")
        if not isinstance(slot, _Slot) or not ("dim" not in named or isinstance(dim, int)):
            return None
        spec = self.tensors[slot.index]
        if dim is None:
            return spec.numel
        # A number has one of everything.
        sizes = spec.sizes or (1,)
        return sizes[dim] if -len(sizes) <= dim < len(sizes) else None

    @property
    def fills(self) -> tuple[str, ...]:
        """The rules that data for this call can be made by."""
        return (OWN, *FILLS) if self.integers else FILLS

    def _decode(self, argument: Mapping[str, Any]) -> Any:
        kind = argument["kind"]
        if kind == "tensor":
            self.tensors.append(decode_tensor(argument))
            return _Slot(len(self.tensors) - 1)
        if kind in ("tensor_list", "scalar_list"):
            return [self._decode(element) for element in argument["elements"]]
        decoder = DECODERS.get(kind)
        if decoder is None:
            raise CallError(f"unknown argument kind {kind!r}")
        return decoder(argument)

    @functools.cached_property
    def effects(self) -> dict[str, Any]:
        """What the operator writes and returns: `_C.operator_effects`."""
        schema = self.op._schema
        if core is None:
            raise CallError("eagercache does not work on this platform")
        return core.operator_effects(schema.name, schema.overload_name)

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Indices of the tensors that this very call writes."""
        names = [argument.name for argument in self.op._schema.arguments]
        arguments = dict(zip(names, self._arguments, strict=True))
        written: set[int] = set()
        for write in self.effects["writes"]:
            if not write["when"] or arguments.get(write["when"]) is not False:
                written.update(_slots(arguments[write["argument"]]))
        return frozenset(written)

    def places(self, argument: str) -> tuple[int, ...]:
        """Indices of the tensors that stand in the argument of that name."""
        for schema, value in zip(self.op._schema.arguments, self._arguments, strict=True):
            if schema.name == argument:
                return tuple(_slots(value))
        return ()

    @functools.cached_property
    def fresh(self) -> tuple[int, ...]:
        """The returns of the operator that are no arguments."""
        return tuple(
            index
            for index, output in enumerate(self.effects["outputs"])
            if output["kind"] != "argument"
        )

    def bind(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call's (args, kwargs) with ``values`` in the tensor positions."""

        def put(argument: Any) -> Any:
            if isinstance(argument, _Slot):
                return values[argument.index]
            if isinstance(argument, list):
                return [put(element) for element in argument]
            return argument

        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for schema, argument in zip(self.op._schema.arguments, self._arguments, strict=True):
            if schema.kwarg_only:
                kwargs[schema.name] = put(argument)
            else:
                args.append(put(argument))
        return args, kwargs

    def invoke(self, values: Sequence[Any]) -> list[Any]:
        """Calls the operator through the dispatcher; its returns as a flat list."""
        args, kwargs = self.bind(values)
        return flatten_returns(self.op(*args, **kwargs))

    def sample(self, fill: str, seed: int) -> Sample:
        """Values by the named rule (one of `fills`), the same for the same seed."""
        generators = {
            device: torch.Generator(device).manual_seed(seed)
            for device in {spec.device for spec in self.tensors}
        }
        sample = Sample([], [])
        for index, spec in enumerate(self.tensors):
            value, base = allocate(spec, fill, generators[spec.device])
            if isinstance(value, torch.Tensor) and index in self.index_ranges:
                put_in_range(value, self.index_ranges[index], generators[spec.device])
            if base is not None and index in self._degrees:
                keep_countable(base, spec.device)
            sample.values.append(value)
            sample.bases.append(base)
        derived = derive(self.name, self.op, self.bind(sample.values)[0])
        for index in self.integers if fill == OWN else self._ordered:
            value, known = sample.values[index], self.integers[index]
            if isinstance(value, torch.Tensor) and (known.whole or value is not derived):
                known.put(value, generators[self.tensors[index].device])
        return sample

    def holds_positions(self, index: int) -> bool:
        """Whether the tensor has a range of its own: what it holds must fit the other arguments."""
        return index in self.index_ranges or index in self._ordered

    def with_wide_floats(self) -> Call:
        """The same call in float64 and complex128, dtype arguments included.

        As a reference for the error of narrower results; its layout is the described one.
        """
        wide = Call.__new__(Call)
        wide.description = self.description
        wide.name, wide.op = self.name, self.op
        wide.state = replace(
            self.state, default_dtype=_WIDER.get(self.state.default_dtype, self.state.default_dtype)
        )
        wide.index_ranges = self.index_ranges
        wide.integers, wide._ordered, wide._degrees = self.integers, self._ordered, self._degrees
        wide.tensors = [
            replace(spec, dtype=_WIDER.get(spec.dtype, spec.dtype)) for spec in self.tensors
        ]
        wide._arguments = [
            _WIDER.get(argument, argument) if isinstance(argument, torch.dtype) else argument
            for argument in self._arguments
        ]
        return wide

    def unreduced(self) -> Call | None:
        """The same call of a loss for its terms; None where it adds none up."""
        place = place_of_reduction(self.op, self._arguments, {})
        if place is None or self.written:
            return None
        terms = copy.copy(self)
        terms._arguments = [*self._arguments]
        terms._arguments[place] = 0
        return terms

    def widen(self, sample: Sample) -> list[Value]:
        """The values of ``sample`` in the dtypes of `with_wide_floats`, exactly, strides kept."""
        values: list[Value] = []
        for value, base in zip(sample.values, sample.bases, strict=True):
            if base is None or not isinstance(value, torch.Tensor):
                values.append(value)
                continue
            wide = base.to(_WIDER.get(base.dtype, base.dtype))
            values.append(wide.as_strided(value.size(), value.stride(), value.storage_offset()))
        return values

    def with_open_integers(self, positions: Sequence[tuple[int, int]]) -> Call:
        """The same call for `bind` with more values: integers, after those of the tensors.

        They take the given places: (argument, element of a list).
        """
        opened = Call(self.description)
        for number, (argument, element) in enumerate(positions):
            slot = _Slot(len(opened.tensors) + number)
            if isinstance(opened._arguments[argument], list):
                opened._arguments[argument][element] = slot
            else:
                opened._arguments[argument] = slot
        return opened


def flatten_returns(result: Any) -> list[Any]:
    """The returns of an operator as one flat list."""
    if result is None:
        return []
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in (flatten_returns(part) or [part])]
    return [result]


_WIDER: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
