"""What a graph indexes with: which values of its inputs may reach a kernel.

Generated code checks indices as it runs, and ends the process where eager raises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.labels import label_range
from eagercache.worker.modules.nodes import (
    divides_integers,
    is_made_here,
    operator_name,
    shifted_input,
)
from eagercache.worker.modules.value_bounds import bounds_of

# (input, low, high, also): its values are in [low, high) or equal ``also``, which is ``low`` where
# there is none.
Range = tuple[int, int, int, int]

# Operators whose generated code checks values as it runs, and would end the process where eager
# raises. The indices of those in `_CHECKED` can be checked before the call when they come straight
# from an input; of the others a forward may have none.
INDEXING = {
    "aten::index_put",
    "aten::index_put_",
    "aten::gather",
    "aten::scatter",
    "aten::scatter_add",
    "aten::scatter_reduce",
    "aten::index_select",
    "aten::index_add",
    "aten::index_copy",
    "aten::take",
    "aten::nll_loss",
    "aten::nll_loss_forward",
    "aten::nll_loss_nd",
    "aten::cross_entropy_loss",
    "aten::one_hot",
    "aten::embedding_bag",
    "aten::_embedding_bag",
    "aten::bincount",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::multinomial",
}
# Where the indices and the dimension stand among the arguments.
_CHECKED = {"aten::embedding": (1, None), "aten::gather": (2, 1), "aten::index_select": (2, 1)}
_DIVIDING = {"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"}


def index_ranges(graph: torch.fx.Graph) -> tuple[Range, ...]:
    """Bounds of the inputs that are used as indices. Raises CompileRefused for other checks."""
    positions = {
        node: index
        for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder")
    }
    ranges = []
    for node in graph.nodes:
        name = operator_name(node)
        labels = label_range(node)
        if labels is not None and labels[0] in positions:
            ranges.append((positions[labels[0]], *labels[1:]))
            continue
        copied = _copied_positions(node)
        if copied is not None and copied[0] in positions:
            ranges.append((positions[copied[0]], *copied[1:]))
            continue
        if name in INDEXING and name not in _CHECKED:
            raise CompileRefused(f"the forward indexes with data ({node.target})")
        if name in _DIVIDING and divides_integers(node):
            raise CompileRefused(f"the forward divides integers by a tensor ({node.target})")
        if name == "aten::index":
            sizes = node.args[0].meta["val"].shape
            for index, rows in zip(node.args[1], sizes, strict=False):
                if index is not None and not _stays_inside(index, rows, from_the_end=True):
                    raise CompileRefused(f"the forward indexes with data ({node.target})")
        if name not in _CHECKED:
            continue
        argument, dimension = _CHECKED[name]
        shape = node.args[0].meta["val"].shape
        rows = shape[0 if dimension is None else node.args[dimension]] if shape else 1
        if dimension is None:
            rows = int(rows)
        found = _range_of_input(node.args[argument], rows)
        if found is not None and found[0] in positions:
            ranges.append((positions[found[0]], *found[1:]))
        elif not _stays_inside(node.args[argument], rows):
            raise CompileRefused(f"the indices of {name.removeprefix('aten::')} are computed")
    return tuple(dict.fromkeys(ranges))


def _range_of_input(index: Any, rows: Any) -> tuple[torch.fx.Node, int, int, int] | None:
    """(input, low, high, also) that keep an index below ``rows``, of a `shifted_input`."""
    found = shifted_input(index)
    if found is None or not isinstance(rows, int):
        return None
    source, least, most = found
    if most - least >= rows:
        return None
    return source, -least, rows - most, -least


def _copied_positions(node: torch.fx.Node) -> tuple[torch.fx.Node, int, int, int] | None:
    """The same for the index of an `index_copy`, as a cache of fixed size has it."""
    if operator_name(node) != "aten::index_copy":
        return None
    into, dimension, index = node.args[:3]
    return _range_of_input(index, into.meta["val"].shape[dimension])


def _stays_inside(index: torch.fx.Node, rows: Any, *, from_the_end: bool = False) -> bool:
    """Whether the indices of every call are known to be below ``rows``, or may be below 0, too.

    They are either the same on every call, as one call shows, or computed within bounds.
    """
    if index.meta["val"].dtype == torch.bool:
        return False
    if is_made_here(index):
        return True
    found = bounds_of(index)
    if found is None:
        return False
    # Of open sizes their environment remembers what is said here.
    return bool(found[0] >= (-rows if from_the_end else 0)) and bool(found[1] < rows)
