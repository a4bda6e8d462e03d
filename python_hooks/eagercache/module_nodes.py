"""What single nodes of a traced graph do, and where their values come from."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

# What an index may go through between an input and an embedding without changing its values.
_TRANSPARENT = {
    "aten::view",
    "aten::reshape",
    "aten::_unsafe_view",
    "aten::unsqueeze",
    "aten::squeeze",
    "aten::expand",
    "aten::slice",
    "aten::select",
    "aten::clone",
    "aten::contiguous",
    "aten::alias",
    "aten::detach",
    "aten::flatten",
    "aten::to",
    "aten::_to_copy",
    "aten::permute",
    "aten::transpose",
    "aten::t",
}


def operator_name(node: Any) -> str:
    """The operator that a node calls, as "aten::add"; "" where it calls none."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return str(schema.name) if schema is not None else ""


def called(graph: torch.fx.Graph, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A new call in a traced graph, with its value's metadata; some argument must be a node."""
    node = graph.call_function(target, args, kwargs)
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
    node.meta["val"] = target(*values, **kwargs)
    return node


def divides_integers(node: torch.fx.Node) -> bool:
    """Whether ``node`` divides integers by a tensor, of which an element may be 0."""
    divisor = node.args[1] if len(node.args) > 1 else None
    if not isinstance(divisor, torch.fx.Node):
        return False
    result = node.meta.get("val")
    return isinstance(result, torch.Tensor) and not (
        result.is_floating_point() or result.is_complex()
    )


def behind(node: Any) -> Any:
    """The node whose values ``node`` shows."""
    while isinstance(node, torch.fx.Node) and operator_name(node) in _TRANSPARENT:
        value = node.meta.get("val")
        before = node.args[0]
        if not isinstance(before, torch.fx.Node) or not isinstance(value, torch.Tensor):
            return node
        if before.meta["val"].is_floating_point() or value.is_floating_point():
            return node
        node = before
    return node


def is_made_here(node: Any) -> bool:
    """Whether no input's values are in ``node``: its values are the same on every call."""
    waiting, seen = [node], set()
    while waiting:
        current = waiting.pop()
        if current in seen or not isinstance(current, torch.fx.Node):
            continue
        seen.add(current)
        if current.op == "placeholder":
            return False
        waiting.extend(current.all_input_nodes)
    return True


def drops_nothing(node: Any) -> bool:
    """Whether the only randomness of the operator is a dropout that is switched off."""
    values = dict(node.kwargs)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        values[argument.name] = value
    for argument in node.target._schema.arguments:
        if argument.name in ("dropout_p", "dropout", "p"):
            probability = values.get(argument.name, argument.default_value)
            if isinstance(probability, (int, float)) and probability == 0:
                return True
        if argument.name in ("train", "training"):
            return values.get(argument.name, argument.default_value) is False
    return False
