"""Calls and counts for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


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
