"""A logged call described as the hook would: its overload, its arguments, its tensors."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# Where sizes of the call's own tensors stand among its numbers.
_SIZE_ARGUMENTS = ("input_sizes", "input_size", "self_size", "size")


class Unreadable(ValueError):
    """A call that cannot be made here; the message says why."""


@dataclass(frozen=True)
class TensorNote:
    """`T(…)` of a log."""

    sizes: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """How a log is read.

    Attributes:
        device: what its tensors are taken to be on.
        scale: the batch dimension is divided by this, rounding up. The batch dimension of a call is
            the first of its largest tensor; tensors of as many dimensions share it.
    """

    device: str = "cpu"
    scale: int = 1


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those that torch gives a new tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe_call(
    operator: str, args: list[Any], kwargs: Mapping[str, Any], reading: Reading
) -> dict[str, Any]:
    """The fields of a trace's call but its state."""
    namespace, _, rest = operator.partition(".")
    name, _, overload = rest.partition(".")
    for candidate in _overloads(namespace, name, overload):
        bound = _bind(candidate._schema, args, kwargs)
        if bound is None:
            continue
        bound = _scaled(bound, reading.scale)
        encoded = []
        for argument, value in bound:
            row = _encode(argument, value, reading)
            encoded.append({"name": argument.name, **row})
        return {
            "op": f"{namespace}::{name}",
            "overload": candidate._schema.overload_name,
            "dispatch_key": "CUDA" if reading.device.startswith("cuda") else "CPU",
            "args": encoded,
        }
    raise Unreadable("no overload of this torch takes these arguments")


def _overloads(namespace: str, name: str, overload: str) -> Iterator[torch._ops.OpOverload]:
    """The named overload, then the others."""
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except AttributeError as error:
        raise Unreadable("this torch has no such operator") from error
    names = packet.overloads()
    for one in [*(n for n in names if n == overload), *(n for n in names if n != overload)]:
        candidate = getattr(packet, one)
        if one == overload or not candidate._schema.is_mutable:
            yield candidate


Bound = list[tuple[Any, Any]]  # an argument of the schema and its value


def _bind(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound | None:
    """Every argument of the schema with its value, defaults included; None when it does not fit."""
    bound: Bound = []
    left = dict(kwargs)
    given = list(args)
    for argument in schema.arguments:
        if given and not argument.kwarg_only:
            value = given.pop(0)
        elif argument.name in left:
            value = left.pop(argument.name)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            return None
        if not _fits(argument.type, value):
            return None
        bound.append((argument, value))
    return None if given or left else bound


def _without_optional(kind: Any) -> str:
    return re.sub(r"^Optional\[(.*)\]$", r"\1", str(kind))


def _fits(kind: Any, value: Any) -> bool:
    text = str(kind)
    if value is None:
        return text.startswith("Optional")
    text = _without_optional(text)
    if text.startswith("List["):
        inner = text[5:-1]
        if not isinstance(value, list):
            return inner == "int" and isinstance(value, int)
        return all(_fits_one(inner, element) for element in value)
    return _fits_one(text, value)


def _fits_one(text: str, value: Any) -> bool:
    if text.startswith("Optional[") and value is None:
        return True
    kind = _without_optional(text)
    if isinstance(value, TensorNote):
        return kind == "Tensor"
    if isinstance(value, bool):
        return kind in ("bool", "number", "Tensor")
    if isinstance(value, int):
        return kind in ("int", "number", "float", "Tensor", "SymInt")
    if isinstance(value, float):
        return kind in ("float", "number", "Tensor")
    if isinstance(value, complex):
        return kind in ("complex", "number", "Tensor")
    if isinstance(value, str):
        return kind in ("str", "Device")
    # The interpreter's type of a dtype, a layout and a memory format is int.
    return kind == "int" and isinstance(value, (torch.dtype, torch.layout, torch.memory_format))


def _scaled(bound: Bound, scale: int) -> Bound:
    notes = [note for _, value in bound for note in _notes(value)]
    if scale == 1 or not notes:
        return bound
    largest = max(notes, key=lambda note: math.prod(note.sizes))
    if not largest.sizes or largest.sizes[0] <= 1:
        return bound
    batch = largest.sizes[0]
    smaller = -(-batch // scale)

    def put(argument: Any, value: Any) -> Any:
        if isinstance(value, TensorNote):
            if len(value.sizes) != len(largest.sizes) or value.sizes[0] != batch:
                return value
            return _with_batch(value, smaller)
        if isinstance(value, list) and value and argument.name in _SIZE_ARGUMENTS:
            return [smaller, *value[1:]] if value[0] == batch else value
        if isinstance(value, list):
            return [put(argument, element) for element in value]
        return value

    return [(argument, put(argument, value)) for argument, value in bound]


def _notes(value: Any) -> Iterator[TensorNote]:
    if isinstance(value, TensorNote):
        yield value
    elif isinstance(value, list):
        for element in value:
            yield from _notes(element)


def _with_batch(note: TensorNote, batch: int) -> TensorNote:
    """The tensor with another first dimension; strides that stepped over it shrink with it."""
    sizes = (batch, *note.sizes[1:])
    if note.strides == contiguous_strides(note.sizes):
        return TensorNote(sizes, note.dtype, contiguous_strides(sizes))
    old = note.sizes[0]
    strides = [
        stride // old * batch if note.strides[0] and stride >= note.strides[0] * old else stride
        for stride in note.strides[1:]
    ]
    return replace(note, sizes=sizes, strides=(note.strides[0], *strides))


def _encode(argument: Any, value: Any, reading: Reading) -> dict[str, Any]:
    """One argument as `describe_call` has it."""
    text = _without_optional(argument.type)
    if value is None:
        return {"kind": "none"}
    if text.startswith("List["):
        return _encode_list(argument, text[5:-1], value, reading)
    return _encode_one(argument, text, value, reading)


def _encode_list(argument: Any, inner: str, value: Any, reading: Reading) -> dict[str, Any]:
    if not isinstance(value, list):  # int[1] takes one number for all
        length = getattr(argument, "N", None) or 1
        value = [value] * length
    if inner in ("Tensor", "Optional[Tensor]"):
        elements = [
            {"kind": "none"} if one is None else _encode_one(argument, "Tensor", one, reading)
            for one in value
        ]
        return {"kind": "tensor_list", "elements": elements}
    if inner == "bool":
        return {"kind": "bool_list", "values": value}
    if inner == "float":
        return {
            "kind": "float_list",
            "values": [repr(float(one)) for one in value],
            "bits": [_bits(float(one)) for one in value],
        }
    if inner == "number":
        elements = [_encode_one(argument, "number", one, reading) for one in value]
        return {"kind": "scalar_list", "elements": elements}
    return {"kind": "int_list", "values": value}


def _encode_one(argument: Any, text: str, value: Any, reading: Reading) -> dict[str, Any]:
    if isinstance(value, TensorNote):
        return _encode_tensor(value, reading)
    if text == "Tensor":
        return _encode_number_as_tensor(value)
    if isinstance(value, torch.dtype):
        name = _on_device(str(value).removeprefix("torch."), reading)
        return {"kind": "scalar_type", "dtype": name}
    if isinstance(value, torch.layout):
        # Recorded from tensors whose storage was not there; none of them was sparse.
        return {"kind": "layout", "layout": "strided"}
    if isinstance(value, torch.memory_format):
        return {"kind": "memory_format", "memory_format": str(value).removeprefix("torch.")}
    if text == "Device" or isinstance(value, torch.device):
        return {"kind": "device", "device": "cpu" if str(value) == "cpu" else reading.device}
    if isinstance(value, str):
        return {"kind": "string", "value": value}
    if isinstance(value, bool) and text in ("bool", "number"):
        return {"kind": "bool", "value": value}
    if isinstance(value, complex):
        parts = [repr(value.real), repr(value.imag)]
        return {
            "kind": "complex",
            "value": parts,
            "real": _bits(value.real),
            "imag": _bits(value.imag),
        }
    if isinstance(value, float) or text == "float":
        return {"kind": "float", "value": repr(float(value)), "bits": _bits(float(value))}
    if _without_optional(argument.real_type) == "MemoryFormat":
        return {"kind": "memory_format", "memory_format": _MEMORY_FORMATS[value]}
    return {"kind": "int", "value": int(value)}


# A schema's default is a number.
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


def _encode_tensor(note: TensorNote, reading: Reading) -> dict[str, Any]:
    return {
        "kind": "tensor",
        "dtype": _on_device(note.dtype, reading),
        "device": reading.device,
        "sizes": list(note.sizes),
        "strides": list(note.strides),
        "wrapped": False,
        "aligned": True,
    }


def _encode_number_as_tensor(value: Any) -> dict[str, Any]:
    """A Python number in a tensor's place, as the dispatcher wraps it."""
    if isinstance(value, bool):
        dtype = "bool"
    elif isinstance(value, int):
        dtype = "int64"
    elif isinstance(value, complex):
        dtype = "complex128"
    else:
        dtype = "float64"
    return {
        "kind": "tensor",
        "dtype": dtype,
        "device": "cpu",
        "sizes": [],
        "strides": [],
        "wrapped": True,
        "aligned": True,
    }


def _on_device(dtype: str, reading: Reading) -> str:
    return "float32" if dtype == "float16" and reading.device == "cpu" else dtype


def _bits(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016x}"
