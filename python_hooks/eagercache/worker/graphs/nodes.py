"""What single nodes of a traced graph do, and where their values come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from eagercache.calls.numerics import HALF

# What an index may go through between an input and an embedding without changing its values.
TRANSPARENT = {
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
    "aten::type_as",
    "aten::_to_copy",
    "prims::convert_element_type",  # as a graph with gradients has it
    "aten::permute",
    "aten::transpose",
    "aten::t",
}


_CASTS = {"aten::to", "aten::_to_copy", "prims::convert_element_type"}


def operator_name(node: Any) -> str:
    """The operator that a node calls, as "aten::add"; "" where it calls none."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return str(schema.name) if schema is not None else ""


def does_in_a_block(target: torch._ops.HigherOrderOperator) -> str:
    """What a forward does whose graph calls ``target``, which takes graphs as arguments."""
    if target.name().startswith("wrap"):
        return "turns gradients or autocast on or off"
    return "branches or loops on its data"


def called(graph: torch.fx.Graph, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A new call in a traced graph, with its value's metadata; some argument must be a node."""
    node = graph.call_function(target, args, kwargs)
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
    node.meta["val"] = target(*values, **kwargs)
    return node


def coarsest_cast(graph: torch.fx.Graph) -> torch.dtype | None:
    """The coarsest dtype to which numbers of a finer one are cast; None where none are.

    Of those that are computed in: one of 8 bits is what something is kept in.
    """
    found: dict[torch.dtype, float] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if operator_name(node) in _CASTS and isinstance(source, torch.fx.Node):
            before, after = source.meta["val"].dtype, node.meta["val"].dtype
            if before.is_floating_point and after in (*HALF, torch.float32):
                place = torch.finfo(after).eps
                found |= {after: place} if place > torch.finfo(before).eps else {}
    return max(found, key=lambda dtype: found[dtype], default=None)


def divides_integers(node: torch.fx.Node) -> bool:
    """Whether ``node`` divides integers by a tensor, of which an element may be 0."""
    divisor = node.args[1] if len(node.args) > 1 else None
    if not isinstance(divisor, torch.fx.Node):
        return False
    result = node.meta.get("val")
    return isinstance(result, torch.Tensor) and not (
        result.is_floating_point() or result.is_complex()
    )


def keeps_integers(node: torch.fx.Node, before: torch.dtype, after: torch.dtype) -> bool:
    """Whether one of `TRANSPARENT` shows the integers that it is given, as indices go.

    One that shows the same bytes in another dtype does not, and none that makes them narrower than
    the dtypes of indices.
    """
    if any(dtype.is_floating_point or dtype.is_complex for dtype in (before, after)):
        return False
    if before == after:
        return True
    return not shows_bytes(node) and after in (torch.int32, torch.int64)


def shows_bytes(node: torch.fx.Node) -> bool:
    """Whether ``node`` shows the bytes of a tensor in another dtype, as `x.view(dtype)` does."""
    return (
        operator_name(node) == "aten::view" and getattr(node.target, "_overloadname", "") == "dtype"
    )


def behind(node: Any) -> Any:
    """The node whose values ``node`` shows."""
    while isinstance(node, torch.fx.Node) and operator_name(node) in TRANSPARENT:
        value = node.meta.get("val")
        before = node.args[0]
        if not isinstance(before, torch.fx.Node) or not isinstance(value, torch.Tensor):
            return node
        if not keeps_integers(node, before.meta["val"].dtype, value.dtype):
            return node
        node = before
    return node


def chosen_from(node: Any) -> Any:
    """The node of whose values those of ``node`` are some, wherever they stand."""
    node = behind(node)
    while operator_name(node) in ("aten::gather", "aten::index_select"):
        node = behind(node.args[0])
    return node


def shifted_input(node: Any) -> tuple[torch.fx.Node, int, int] | None:
    """(input, least, most): ``node`` has values of an integer input, each with a number added.

    The number lies between the other two. Positions behind those that a cache has counted are such.
    """
    node = chosen_from(node)
    if not isinstance(node, torch.fx.Node):
        return None
    if node.op == "placeholder":
        value = node.meta.get("val")
        is_index = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
        return (node, 0, 0) if is_index else None
    if operator_name(node) != "aten::add" or "alpha" in node.kwargs or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        found, ends = shifted_input(one), _known_ends(other)
        if found is not None and ends is not None:
            return found[0], found[1] + ends[0], found[2] + ends[1]
    return None


def _known_ends(value: Any) -> tuple[int, int] | None:
    """The least and the largest of a number or of an `arange` of them."""
    if type(value) is int:
        return value, value
    node = behind(value)
    given = getattr(node, "args", ())
    if operator_name(node) != "aten::arange" or not all(type(number) is int for number in given):
        return None
    numbers = range(*given)
    return (numbers[0], numbers[-1]) if len(numbers) and numbers.step > 0 else None


def draws_numbers(node: Any) -> bool:
    """Whether ``node`` calls an operator that draws random numbers.

    The gradients of attention, which are tagged so too, take what their forward drew from.
    """
    tags = getattr(getattr(node, "target", None), "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags or drops_nothing(node):
        return False
    schema: Any = node.target._schema
    return all(argument.name != "philox_seed" for argument in schema.arguments)


def counts_from_the_storage(node: Any) -> bool:
    """Whether ``node`` shows an input's memory from a place counted from its storage's start.

    Where in its storage an input begins differs from call to call, and no key holds it.
    """
    if operator_name(node) not in _BY_STORAGE:
        return False
    values = arguments_of(node)
    return values.get("storage_offset") is not None and _may_show_an_input(values["self"])


_BY_STORAGE = {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"}


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """What a node gives to its operator, by the names of the schema."""
    schema: Any = getattr(node.target, "_schema", None)
    names = (argument.name for argument in schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _may_show_an_input(node: Any) -> bool:
    while isinstance(node, torch.fx.Node) and node.op != "placeholder":
        schema = getattr(node.target, "_schema", None)
        if schema is not None and all(value.alias_info is None for value in schema.returns):
            return False
        node = node.args[0] if node.args else None
    return isinstance(node, torch.fx.Node)


def ancestors(
    *nodes: torch.fx.Node, but: Callable[[torch.fx.Node], bool] = lambda _: False
) -> set[torch.fx.Node]:
    """The nodes and all that they are computed from, ``but`` such nodes and what only they need."""
    seen: set[torch.fx.Node] = set()
    waiting = [*nodes]
    while waiting:
        current = waiting.pop()
        if current not in seen and not but(current):
            seen.add(current)
            waiting.extend(current.all_input_nodes)
    return seen


def is_made_here(node: Any) -> bool:
    """Whether ``node`` has the same values on every call: none of an input, and none drawn."""
    waiting, seen = [node], set()
    while waiting:
        current = waiting.pop()
        if current in seen or not isinstance(current, torch.fx.Node):
            continue
        seen.add(current)
        if current.op == "placeholder" or draws_numbers(current):
            return False
        waiting.extend(current.all_input_nodes)
    return True


def drops_nothing(node: Any) -> bool:
    """Whether the only randomness of the operator is a dropout that is switched off."""
    values = arguments_of(node)
    for argument in node.target._schema.arguments:
        if argument.name in ("dropout_p", "dropout", "p"):
            probability = values.get(argument.name, argument.default_value)
            if isinstance(probability, (int, float)) and probability == 0:
                return True
        if argument.name in ("train", "training"):
            return values.get(argument.name, argument.default_value) is False
    return False
