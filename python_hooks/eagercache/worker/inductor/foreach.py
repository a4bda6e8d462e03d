"""Operators over lists of tensors, taken apart: one node for each element.

Native does the same on CPU, so the bits are its own; and Inductor, which has no kernels for most of
these operators, has them for the parts, and fuses those into one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

PREFIX = "aten::_foreach_"

# Names of a list operator's scalar argument where the part calls it otherwise.
_RENAMED = {("addcmul", "scalars"): "value", ("addcdiv", "scalars"): "value"}


def each_alone(
    graph: torch.fx.Graph, op: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]
) -> list[torch.fx.Node] | None:
    """The nodes that compute ``op`` on each element; None where its parts are not known.

    ``args`` and ``kwargs`` are the call's, with nodes for tensors.
    """
    schema = op._schema
    base = schema.name.removeprefix(PREFIX)
    if schema.overload_name.endswith("out") or not args or not isinstance(args[0], list):
        return None
    part = getattr(torch.ops.aten, base, None)
    if part is None:
        return None
    count = len(args[0])
    nodes = []
    for index in range(count):
        own_args: list[Any] = []
        own_kwargs: dict[str, Any] = {}
        for argument, value in _named(schema, args, kwargs):
            own = value
            if isinstance(value, list):
                if len(value) != count:
                    return None
                own = value[index]
            renamed = _RENAMED.get((base.rstrip("_"), argument.name))
            if renamed is not None:
                own_kwargs[renamed] = own
            elif argument.kwarg_only or argument.name in ("alpha", "value"):
                own_kwargs[argument.name] = own
            else:
                own_args.append(own)
        try:
            chosen = _overload(part, own_args, own_kwargs)
        except LookupError:
            return None
        nodes.append(graph.call_function(chosen, tuple(own_args), own_kwargs))
    return nodes


def _named(
    schema: torch.FunctionSchema, args: list[Any], kwargs: dict[str, Any]
) -> list[tuple[Any, Any]]:
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    named = list(zip(positional, args, strict=False))
    by_name = {argument.name: argument for argument in schema.arguments}
    return named + [(by_name[name], value) for name, value in kwargs.items()]


def _fits(argument: Any, value: Any) -> bool:
    if isinstance(value, torch.fx.Node):
        return str(argument.type) == "Tensor"
    if isinstance(value, bool):
        return str(argument.type) in ("bool", "number")
    return str(argument.type) == "number"


def _overload(
    packet: torch._ops.OpOverloadPacket, args: list[Any], kwargs: dict[str, Any]
) -> torch._ops.OpOverload:
    """The overload that takes exactly these. Raises LookupError."""
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = {argument.name: argument for argument in overload._schema.arguments}
        positional = [a.name for a in arguments.values() if not a.kwarg_only]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        if len(given) != len(args) + len(kwargs) or not set(given) <= set(arguments):
            continue
        if any(a.name not in given and not a.has_default_value() for a in arguments.values()):
            continue
        if all(_fits(arguments[name], value) for name, value in given.items()):
            return overload
    raise LookupError(f"{packet} has no overload for these arguments")
