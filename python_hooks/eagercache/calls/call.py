"""Operator calls rebuilt from their descriptions.

A description is what the hook knows of a call (guards/key/call_key.h): the operator, every argument
with its value, and of tensors all but the data; of integer tensors it may say what they held.
`Call` decodes one; `Call.sample` makes tensors of exactly the described metadata and fills them
from a seed; `Call.invoke` calls the operator.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from eagercache.base.load import core
from eagercache.base.operators import described_name
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

ALIGNMENT = 64  # bytes; kAlignment of guards/key/call_key.h

# What a tensor position of a call is filled with.
Value: TypeAlias = torch.Tensor | bool | int | float | complex


class CallError(ValueError):
    """The description does not make a call here."""


@dataclass(frozen=True)
class TensorSpec:
    """All of a tensor but its data."""

    dtype: torch.dtype
    device: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    wrapped: bool  # a Python number: a 0-dim tensor that promotes differently
    aligned: bool  # the data pointer is a multiple of ALIGNMENT

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one that the tensor reaches, both included."""
        if self.numel == 0:
            return 0
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)
        )


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


@dataclass
class Sample:
    """Values for every tensor position of a call.

    ``bases`` are whole allocations, guard zones included, None for Python numbers: comparing them
    finds a write outside the tensor as well as one inside.
    """

    values: list[Value]
    bases: list[torch.Tensor | None]

    def clone(self) -> Sample:
        """The same bits in the same layout and alignment, in memory of its own."""
        values: list[Value] = []
        bases: list[torch.Tensor | None] = []
        for value, base in zip(self.values, self.bases, strict=True):
            if base is None or not isinstance(value, torch.Tensor):
                values.append(value)
                bases.append(None)
                continue
            copy = base.clone()
            bases.append(copy)
            values.append(copy.as_strided(value.size(), value.stride(), value.storage_offset()))
        return Sample(values, bases)


@contextlib.contextmanager
def autocast_set(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast on ``device`` to ``dtype``, or none, for the block; no cast is kept for later.

    Unlike `torch.autocast` for every dtype, as a thread's state may be set, and with no end of a
    block at which casts that the caller keeps would be dropped.
    """
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, dtype is not None)
    torch.set_autocast_dtype(device, dtype or before)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_cache_enabled(keeps)


@dataclass(frozen=True)
class GlobalState:
    """State of process and thread that is part of the key."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    fill_uninitialized_memory: bool
    num_threads: int
    # (device type, dtype) of the autocast under which an operator that is a function was called.
    autocast: tuple[str, torch.dtype] | None = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The state set for the block, the previous one restored after it."""
        before = GlobalState.current()
        self._set()
        casts = contextlib.nullcontext() if self.autocast is None else autocast_set(*self.autocast)
        try:
            with casts:
                yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(
            self.deterministic, warn_only=self.deterministic_warn_only
        )
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_uninitialized_memory
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    @staticmethod
    def current() -> GlobalState:
        """The state of this process and thread, but for autocast."""
        return GlobalState(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fill_uninitialized_memory=torch.utils.deterministic.fill_uninitialized_memory,
            num_threads=torch.get_num_threads(),
        )

    def as_json(self) -> dict[str, Any]:
        """The state as descriptions have it, but for autocast."""
        return {
            "default_dtype": str(self.default_dtype).removeprefix("torch."),
            "deterministic": self.deterministic,
            "deterministic_warn_only": self.deterministic_warn_only,
            "fill_uninitialized_memory": self.fill_uninitialized_memory,
            "num_threads": self.num_threads,
        }


class Call:
    """One described operator call."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        """Raises CallError when an operator, argument or kind is not known here."""
        self.description = dict(description)
        self.name = described_name(description)
        self.op = _find_operator(description["op"], description["overload"])
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
            self.tensors.append(_decode_tensor(argument))
            return _Slot(len(self.tensors) - 1)
        if kind in ("tensor_list", "scalar_list"):
            return [self._decode(element) for element in argument["elements"]]
        decoder = _DECODERS.get(kind)
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
            value, base = _allocate(spec, fill, generators[spec.device])
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


def _find_operator(name: str, overload: str) -> torch._ops.OpOverload:
    namespace, _, base = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), base)
        return getattr(packet, overload or "default")
    except AttributeError as error:
        raise CallError(f"there is no operator {name}.{overload}") from error


def decode_state(description: Mapping[str, Any]) -> GlobalState:
    """The "state" of a description."""
    state = description["state"]
    autocast = None
    if "autocast" in state:
        device = str(description.get("dispatch_key", "CPU")).lower()
        autocast = (device, _dtype(state["autocast"]))
    return GlobalState(
        default_dtype=_dtype(state["default_dtype"]),
        deterministic=bool(state["deterministic"]),
        deterministic_warn_only=bool(state["deterministic_warn_only"]),
        fill_uninitialized_memory=bool(state["fill_uninitialized_memory"]),
        num_threads=int(state["num_threads"]),
        autocast=autocast,
    )


def _decode_tensor(argument: Mapping[str, Any]) -> TensorSpec:
    spec = TensorSpec(
        dtype=_dtype(argument["dtype"]),
        device=argument["device"],
        sizes=tuple(argument["sizes"]),
        strides=tuple(argument["strides"]),
        wrapped=bool(argument["wrapped"]),
        aligned=bool(argument["aligned"]),
    )
    if len(spec.sizes) != len(spec.strides):
        raise CallError("a tensor has another number of strides than of sizes")
    if any(stride < 0 for stride in spec.strides):
        raise CallError("a tensor has a negative stride")
    if spec.wrapped and spec.sizes:
        raise CallError("a wrapped number has dimensions")
    return spec


def _attribute_of_torch(name: str, expected: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, expected):
        raise CallError(f"torch has no {expected.__name__} {name!r}")
    return value


def _dtype(name: str) -> torch.dtype:
    return _attribute_of_torch(name, torch.dtype)


def _double(bits: str) -> float:
    return struct.unpack("<d", int(bits, 16).to_bytes(8, "little"))[0]


def _decode_string(argument: Mapping[str, Any]) -> str:
    if "value" not in argument:
        raise CallError("a string argument is not UTF-8")
    return argument["value"]


_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    # An undefined tensor is what the dispatcher makes of None in the place of a Tensor.
    "none": lambda argument: None,
    "undefined_tensor": lambda argument: None,
    "int": lambda argument: int(argument["value"]),
    "float": lambda argument: _double(argument["bits"]),
    "bool": lambda argument: bool(argument["value"]),
    "complex": lambda argument: complex(_double(argument["real"]), _double(argument["imag"])),
    "string": _decode_string,
    "int_list": lambda argument: [int(value) for value in argument["values"]],
    "float_list": lambda argument: [_double(bits) for bits in argument["bits"]],
    "bool_list": lambda argument: [bool(value) for value in argument["values"]],
    "scalar_type": lambda argument: _dtype(argument["dtype"]),
    "layout": lambda argument: _attribute_of_torch(argument["layout"], torch.layout),
    "memory_format": lambda argument: _attribute_of_torch(
        argument["memory_format"], torch.memory_format
    ),
    "device": lambda argument: torch.device(argument["device"]),
}

_WIDER: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}

# The rules that data is made by. Which ones a call can take depends on what it does with its data
# (indices, probabilities, divisors): a proof uses those that native accepts. "zeros" are of both
# signs, so that they meet in every combination; "wide" reaches the tails of exponentials and
# hyperbolic functions, where what a cancellation leaves decides; the sums of "cancelling" numbers
# show in which order they were added.
FILLS = (
    "normal",
    "unit",
    "integers",
    "extreme",
    "special",
    "sparse_special",
    "ones",
    "zeros",
    "wide",
    "cancelling",
    "negative_zeros",
)
# And of those that some calls are proved on, too: one number everywhere, special values alone.
ALIKE = "alike"
ALL_SPECIAL = "all_special"


def _allocate(
    spec: TensorSpec, fill: str, generator: torch.Generator
) -> tuple[Value, torch.Tensor | None]:
    if spec.wrapped:
        return _fill_flat(1, spec.dtype, fill, generator).item(), None
    itemsize = spec.dtype.itemsize
    guard = ALIGNMENT // itemsize
    offset = guard if spec.aligned else guard + 1
    base = _fill_flat(offset + spec.extent + guard, spec.dtype, fill, generator)
    value = base.as_strided(spec.sizes, spec.strides, offset)
    if (value.data_ptr() % ALIGNMENT == 0) != spec.aligned:
        raise CallError("the allocator gives another alignment than the call had")
    return value, base


def _fill_flat(
    count: int, dtype: torch.dtype, fill: str, generator: torch.Generator
) -> torch.Tensor:
    """``count`` elements in memory order; overlapping tensors see some of them twice."""
    if fill == "ones":
        return torch.ones(count, dtype=dtype, device=generator.device)
    if fill in ("zeros", "negative_zeros") and not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(count, dtype=dtype, device=generator.device)
    if dtype == torch.bool:
        return torch.randint(
            0, 2, (count,), dtype=torch.uint8, generator=generator, device=generator.device
        ).to(dtype)
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        flat = _fill_flat(2 * count, part, fill, generator)
        return torch.view_as_complex(flat.view(count, 2))
    if dtype.is_floating_point:
        return _fill_floats(count, dtype, fill, generator)
    return _fill_integers(count, dtype, fill, generator)


def _fill_floats(
    count: int, dtype: torch.dtype, fill: str, generator: torch.Generator
) -> torch.Tensor:
    if fill in ("unit", "wide"):
        part = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
        return (part if fill == "unit" else 32 * part - 16).to(dtype)
    if fill == "negative_zeros":
        return torch.full((count,), -0.0, dtype=dtype, device=generator.device)
    if fill == ALIKE:
        part = torch.rand(1, generator=generator, dtype=torch.float64, device=generator.device)
        return (0.25 + 0.75 * part).to(dtype).repeat(count)
    if fill == "zeros":
        signs = torch.randint(0, 2, (count,), generator=generator, device=generator.device)
        return torch.where(signs > 0, 0.0, -0.0).to(dtype)
    if fill == "integers":
        return torch.randint(-4, 5, (count,), generator=generator, device=generator.device).to(
            dtype
        )
    flat = torch.randn(count, generator=generator, dtype=torch.float64, device=generator.device).to(
        dtype
    )
    info = torch.finfo(dtype)
    if fill == "cancelling":
        large = 2.0 ** {torch.float64: 50, torch.float16: 10}.get(dtype, 20)
        return _scatter(flat, torch.tensor([large, -large], dtype=dtype), 2, generator)
    finite = [0.0, -0.0, info.smallest_normal, info.smallest_normal / 2, -info.smallest_normal / 4,
              info.max, info.min, info.eps, 1.0, -1.0]  # fmt: skip
    values = finite if fill == "extreme" else [*finite, math.nan, math.inf, -math.inf]
    if fill not in ("extreme", "special", "sparse_special", ALL_SPECIAL):
        return flat
    every = {"sparse_special": 97, ALL_SPECIAL: 1}.get(fill, 3)
    return _scatter(flat, torch.tensor(values, dtype=torch.float64).to(dtype), every, generator)


def _fill_integers(
    count: int, dtype: torch.dtype, fill: str, generator: torch.Generator
) -> torch.Tensor:
    info = torch.iinfo(dtype)
    if fill == "unit":  # usable as an index, a class label, a shift
        return torch.randint(0, 2, (count,), generator=generator, device=generator.device).to(dtype)
    # "wide" integers are past what half precision holds exactly.
    reach = {"normal": 100, "cancelling": 100, "wide": 100_000}.get(fill, 4)
    low, high = max(-reach, info.min), min(reach, info.max) + 1
    flat = torch.randint(low, high, (count,), generator=generator, device=generator.device).to(
        dtype
    )
    if fill not in ("extreme", "special", "sparse_special"):
        return flat
    values = torch.tensor([info.min, info.max, info.min + 1, info.max - 1, 0, 1], dtype=dtype)
    return _scatter(flat, values, 97 if fill == "sparse_special" else 3, generator)


def _scatter(
    flat: torch.Tensor, values: torch.Tensor, every: int, generator: torch.Generator
) -> torch.Tensor:
    count = flat.numel()
    chosen = torch.randint(0, every, (count,), generator=generator, device=flat.device) == 0
    which = torch.randint(0, values.numel(), (count,), generator=generator, device=flat.device)
    return torch.where(chosen, values.to(flat.device)[which], flat)
