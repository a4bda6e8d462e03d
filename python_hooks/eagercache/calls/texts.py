"""Calls, counts and errors for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# What is said of a key that has no verdict, because its kernel is being made.
NOT_YET = "not yet"

# What each rule by which a call steps aside is about (guards/builder/aside_reason.h).
ASIDE_RULES: Mapping[str, str] = {
    "tensor_kind": "a tensor is sparse, quantized, nested, a subclass, conjugated or the like",
    "mixed_devices": "a tensor is on another device",
    "named_tensor": "a tensor has names",
    "empty_tensor": "a tensor has no elements",
    "no_storage": "a tensor has no memory",
    "large_extent": "a tensor reaches past 2**31 elements",
    "dtype": "a tensor has a rare dtype",
    "integer_division": "all operands are integers: native raises on a zero divisor",
    "symbolic": "a number is symbolic",
    "unexpected_value": "an argument is not what the schema promises",
    "key_too_long": "the call has too many tensors or dimensions",
    "dispatch_state": "a function transform or a Python mode is active",
    "floating_point_mode": "denormals are flushed, or the rounding mode is not the default",
    "parallel_region": "it was called from inside a parallel region",
    "overlap": "memory that it writes is also another argument's, or overlaps itself",
}


def argument_texts(arguments: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The arguments of a described call, each in a few characters; None is left out."""
    for argument in arguments:
        kind = argument.get("kind")
        if kind == "tensor":
            sizes = "x".join(map(str, argument["sizes"])) or "0-dim"
            yield f"{argument['dtype']}[{sizes}]"
        elif kind == "tensor_list":
            yield f"[{', '.join(argument_texts(argument['elements']))}]"
        elif kind not in ("none", "undefined_tensor"):
            value = argument.get("value", argument.get("values", argument.get("dtype", "")))
            yield f"{argument.get('name', '')}={value}"


def counted(count: int, one: str, many: str = "") -> str:
    """As "1 key" or "2 keys"; ``many`` where it is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def first_line(error: BaseException, most: int = 240) -> str:
    """The first line of an error's text that is not blank, cut off; its kind where it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:most]


def named_line(error: BaseException, most: int = 240) -> str:
    """The same behind the error's kind, which is not cut off."""
    kind = type(error).__name__
    return f"{kind}: {first_line(error, most)}" if str(error).strip() else f"{kind}: no message"
