"""Descriptions of calls (guards/key/call_key.h) decoded: operator, state and arguments."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.calls.global_state import GlobalState

ALIGNMENT = 64  # bytes; kAlignment of guards/key/call_key.h


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


def find_operator(name: str, overload: str) -> torch._ops.OpOverload:
    """Raises CallError where torch has none of that name."""
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


def decode_tensor(argument: Mapping[str, Any]) -> TensorSpec:
    """A tensor's part of a description. Raises CallError for what no tensor is like."""
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


DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
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
