"""Which arguments of a call need not be kept, because what is kept for its backward has them.

A traced graph may read of an argument a cast alone, under autocast, or a part of it. Where that is
saved, the argument can be made again, for gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from eagercache.calls.numerics import HALF
from eagercache.worker.graphs.nodes import operator_name

# Operators that show all memory of their first argument in another form.
WHOLE_VIEWS = {
    "aten::alias",
    "aten::detach",
    "aten::expand",
    "aten::permute",
    "aten::squeeze",
    "aten::t",
    "aten::transpose",
    "aten::unsqueeze",
    "aten::view",
}
# Of these, those that show each element once.
_IN_ORDER = WHOLE_VIEWS - {"aten::expand"}
# Those that show a part of it.
PARTS = {"aten::select", "aten::slice"}
VIEWS = WHOLE_VIEWS | PARTS | {"aten::as_strided"}

# Operators that give all elements of their first argument in the same sizes.
_COPIES = {
    "aten::_to_copy",
    "aten::alias",
    "aten::clone",
    "aten::detach",
    "prims::convert_element_type",
}
# The floating-point dtypes whose every number one of another dtype is, too.
_WITHIN = {torch.float64: (torch.float32, *HALF), torch.float32: HALF}

# Elements of a tensor: sizes, strides, and where the first one is.
Part = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True)
class Rebuilt:
    """An argument that is made again of what is saved, where it is needed again.

    ``input`` of the forward, number ``argument`` of the call's, of which ``saved[position]`` has
    all that is read: of the whole, or of one ``part``, in the very sizes.
    """

    input: int
    position: int
    argument: int
    part: Part | None

    def row(self) -> list[Any]:
        """What the core is told."""
        part: list[Any] | None = None
        if self.part is not None:
            sizes, strides, offset = self.part
            part = [list(sizes), list(strides), offset]
        return [self.input, self.position, self.argument, part]


def read_as(
    graph: torch.fx.Graph, arguments: Mapping[int, torch.Tensor]
) -> dict[int, tuple[torch.dtype, Part | None]]:
    """In which dtype the graph reads each of ``arguments``, and which part of it.

    They stand by their place among the placeholders, as does what is found. The dtype is at most
    the argument's own; the part is None for the whole, or for several parts. Those that are not
    dense cannot be laid out again, and are left out.
    """
    found = {}
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        value = arguments.get(index)
        if value is None:
            continue
        dense = torch.empty_like(value, memory_format=torch.preserve_format)
        if dense.stride() != value.stride():
            continue
        reads = _reads(node, node, None, shows=True)
        dtypes, parts = {dtype for dtype, _ in reads}, {part for _, part in reads}
        found[index] = (
            dtypes.pop() if len(dtypes) == 1 else value.dtype,
            parts.pop() if len(parts) == 1 else None,
        )
    return found


def _reads(
    node: torch.fx.Node, argument: torch.fx.Node, part: Part | None, *, shows: bool
) -> set[tuple[torch.dtype, Part | None]]:
    """The narrower dtypes that what ``node`` shows is cast to, its own where it is read.

    With each the part of ``argument`` that it is. ``shows``: it is the argument's memory.
    """
    own: torch.dtype = node.meta["val"].dtype
    found: set[tuple[torch.dtype, Part | None]] = set()
    for user in node.users:
        value = user.meta.get("val")
        name = operator_name(user)
        if shows and name in PARTS:
            found |= _reads(user, argument, part_of(user, argument), shows=True)
        elif name not in _COPIES | WHOLE_VIEWS or not isinstance(value, torch.Tensor):
            found.add((own, part))
        elif value.dtype in _WITHIN.get(own, ()):
            found.add((value.dtype, part))
        elif value.dtype == own:
            views = name in WHOLE_VIEWS
            found |= _reads(user, argument, part, shows=shows and views)
        else:
            found.add((own, part))
    return found


def part_of(node: torch.fx.Node, argument: torch.fx.Node) -> Part:
    """Which elements of ``argument`` a view of it shows."""
    shown, whole = node.meta["val"], argument.meta["val"]
    offset = shown.storage_offset() - whole.storage_offset()
    return tuple(shown.size()), tuple(shown.stride()), int(offset)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every number of the dtype ``other`` is one of ``dtype``."""
    return dtype == other or other in _WITHIN.get(dtype, ())


@dataclass(frozen=True)
class Copy:
    """What a node is a copy of.

    ``part`` of ``argument``, which is None where it has the argument's very sizes. ``is_whole``:
    all of it, in whatever order. ``dtypes``: of the copies on the way.
    """

    argument: torch.fx.Node
    part: Part | None
    is_whole: bool
    dtypes: tuple[torch.dtype, ...]


def copied(node: torch.fx.Node) -> Copy:
    """What ``node`` is a copy of: itself, at the least."""
    dtypes = [node.meta["val"].dtype]
    while operator_name(node) in _COPIES and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
        dtypes.append(node.meta["val"].dtype)
    shown, is_whole = node, True
    while operator_name(node) in PARTS | _IN_ORDER and isinstance(node.args[0], torch.fx.Node):
        is_whole = is_whole and operator_name(node) in _IN_ORDER
        node = node.args[0]
    part = None if shown is node else part_of(shown, node)
    return Copy(node, part, is_whole, tuple(dtypes))


def views_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The views, last one first, through which ``node`` shows what is to be saved.

    That is an input, or a tensor that is shown whole: other views of it are saved at no cost. A
    copy of an input, in another layout for one, is made again.
    """
    if operator_name(node) == "aten::clone" and node.args[0].op == "placeholder":
        return [node]
    for views in (VIEWS, WHOLE_VIEWS):
        chain = []
        root = node
        while operator_name(root) in views and isinstance(root.args[0], torch.fx.Node):
            chain.append(root)
            root = root.args[0]
        if root.op == "placeholder":
            break
    return chain


def shown_by(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory ``node`` shows, whole or a part of it."""
    while operator_name(node) in VIEWS and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def root_of(node: torch.fx.Node, views: Sequence[torch.fx.Node]) -> torch.fx.Node:
    """What ``node`` shows through those of its ``views``."""
    root = views[-1].args[0] if views else node
    assert isinstance(root, torch.fx.Node)
    return root
