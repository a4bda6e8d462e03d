"""What a graph indexes with: which values of its inputs may reach a kernel.

Generated code checks indices as it runs, and ends the process where eager raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.index_sources import index_sources
from eagercache.worker.graphs.labels import label_range
from eagercache.worker.graphs.nodes import (
    ancestors,
    called,
    divides_integers,
    is_made_here,
    operator_name,
    shifted_input,
)
from eagercache.worker.graphs.value_bounds import bounds_of
from eagercache.worker.inductor.call_graph import TRAPS
from eagercache.worker.inductor.commands import CompileRefused

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
    "aten::index_fill",
    "aten::put",
    "aten::take",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    "aten::multi_margin_loss",
    "aten::multilabel_margin_loss_forward",
    "aten::nll_loss",
    "aten::nll_loss_forward",
    "aten::nll_loss_nd",
    "aten::cross_entropy_loss",
    "aten::one_hot",
    "aten::bincount",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::multinomial",
}
# Where the index and the dimension stand among the arguments.
_ALONG = (2, 1)
_CHECKED = {
    # Of bags native's own kernel computes, and raises for where they begin.
    **dict.fromkeys(("aten::embedding", "aten::embedding_bag", "aten::_embedding_bag"), (1, None)),
    **dict.fromkeys(("aten::gather", "aten::index_select"), _ALONG),
    **dict.fromkeys(("aten::scatter", "aten::scatter_add", "aten::scatter_reduce"), _ALONG),
    **dict.fromkeys(("aten::index_add", "aten::index_copy"), _ALONG),
}
# Where the labels of a loss stand, right behind the scores; what is skipped stands three behind.
_LOSSES = {
    "aten::nll_loss_forward": 1,
    "aten::nll_loss_backward": 2,
    "aten::nll_loss2d_forward": 1,
    "aten::nll_loss2d_backward": 2,
}
# Their indices are a list, each for one dimension, and may be counted from its end.
_LISTED = ("aten::index", "aten::index_put")
_aten = torch.ops.aten
_DIVIDING = {"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"}


# What raises for values that are not between 0 and 1, NaN among them; generated code does not.
_LOOKS_AT_DATA = frozenset(("aten::binary_cross_entropy",))


def refuse_data_checks(exported: torch.fx.GraphModule) -> None:
    """Raises CompileRefused for operators that raise for some data, without any index.

    For a graph as it was exported: later such an operator is decomposed, and its check is gone.
    """
    for part in exported.modules():  # blocks of autocast are graphs of their own
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if operator_name(node) in _LOOKS_AT_DATA:
                raise CompileRefused(f"the forward raises for some data ({node.target})")


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
        if name in INDEXING and name not in _CHECKED and name not in _LISTED:
            raise CompileRefused(f"the forward indexes with data ({node.target})")
        if name in _DIVIDING and divides_integers(node):
            raise CompileRefused(f"the forward divides integers by a tensor ({node.target})")
        for index, rows, from_the_end in _uses(node):
            # On a GPU nothing is looked at before a call (`trap_negative_indices`).
            found = _range_of_input(index, rows)
            if found is not None and found[0] in positions:
                source, low, high, _ = found
                low -= rows if _counts_from_the_end(node) else 0
                ranges.append((positions[source], low, high, low))
            elif not _stays_inside(index, rows, from_the_end=from_the_end):
                ranges.extend(_ranges_behind(node, index, rows, positions))
    return tuple(dict.fromkeys(ranges))


def _ranges_behind(
    node: torch.fx.Node, index: torch.fx.Node, rows: Any, positions: Mapping[torch.fx.Node, int]
) -> list[Range]:
    """Bounds of the inputs that an index is made of. Raises CompileRefused for another one."""
    sources = index_sources(index, rows) if isinstance(rows, int) else None
    if sources is None or not sources.keys() <= positions.keys():
        name = operator_name(node)
        masks = _masks_behind(index, rows)
        if masks and masks <= positions.keys():
            return [(positions[mask], 0, 2, 0) for mask in masks]
        if name in _LISTED:
            raise CompileRefused(f"the forward indexes with data ({node.target})")
        raise CompileRefused(f"the indices of {name.removeprefix('aten::')} are computed")
    return [
        (positions[source], 0, rows, *(replaced if len(replaced) == 1 else (0,)))
        for source, replaced in sources.items()
    ]


def _masks_behind(index: torch.fx.Node, rows: Any) -> set[torch.fx.Node]:
    """The inputs of integers by which an index is counted that is inside where each is 0 or 1.

    So a model counts a mask's tokens for their positions. Nothing where it does something else.
    """
    met = ancestors(index)
    masks = {
        node
        for node in met
        if node.op == "placeholder"
        and isinstance(value := node.meta.get("val"), torch.Tensor)
        and value.dtype in (torch.int32, torch.int64)
    }
    found = bounds_of(index, dict.fromkeys(masks, (0, 1)))
    counts = any(operator_name(node) == "aten::cumsum" for node in met)
    inside = found is not None and bool(found[0] >= 0) and bool(found[1] < rows)
    return masks if counts and inside else set()


def checks_beside_writes(graph: torch.fx.Graph) -> bool:
    """Whether a graph indexes or divides, and writes into tensors, be it by that very operator.

    Then a node does not say what an index holds when it is used, and operators have other names:
    the graph is to be one without writes before it is looked at here.
    """
    known = {*INDEXING, *_CHECKED, *_LISTED, *_DIVIDING}
    names = [operator_name(node).removesuffix("_") for node in graph.nodes]
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    writes = any(schema is not None and schema.is_mutable for schema in schemas)
    return writes and not known.isdisjoint(names)


def indexes(graph: torch.fx.Graph) -> bool:
    """Whether the graph has an operator whose generated code may check an index."""
    return any(operator_name(node) in _CHECKED or _uses(node) for node in graph.nodes)


def check_inside(graph: torch.fx.Graph) -> bool:
    """Has the graph check what it indexes with, where that is not known before a call.

    Whatever lies outside becomes an index that is inside, and the graph has one output more, the
    last: a boolean, whether nothing did. Where it is false the answer means nothing, and the
    forward is to be run, which raises. Returns whether there was something to check.
    """
    inputs = set(graph.find_nodes(op="placeholder"))
    flags: list[torch.fx.Node] = []
    for node in list(graph.nodes):
        labels = label_range(node)
        if labels is not None and labels[0] in inputs:
            continue
        for index, rows, from_the_end in _uses(node):
            found = None if from_the_end else _range_of_input(index, rows)
            known = found is not None and found[0] in inputs
            if not known and not _stays_inside(index, rows, from_the_end=from_the_end):
                flags.append(_clamp(graph, node, index, (-rows if from_the_end else 0, rows - 1)))
    if not flags:
        return False
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        inside = flags[0]
        for flag in flags[1:]:
            inside = called(graph, _aten.logical_and.default, inside, flag)
    output.args = ((*output.args[0], inside),)
    return True


def trap_negative_indices(graph: torch.fx.Graph) -> None:
    """Lets a kernel on a GPU end a program where eager's would: Inductor counts from the end.

    Nobody looks at a GPU's values before a call. Generated code traps on indices that are too
    large, as eager does, but takes negative ones for every operator; for those that may not count
    so they become a number that is too large.
    """
    for node in list(graph.nodes):
        if _counts_from_the_end(node):
            continue
        uses = [(index, rows, None) for index, rows, _ in _uses(node)]
        for index, rows, skipped in uses or classes_of(node):
            value = index.meta["val"]
            is_index = value.is_cuda and value.dtype in (torch.int32, torch.int64)
            if is_index and not _stays_inside(index, rows):
                _trap(graph, node, index, rows, skipped)


def let_trap(graph: torch.fx.GraphModule) -> None:
    """Lets generated code check on a GPU what ``graph`` indexes with, as eager's does.

    For a graph whose indices are in range for made-up data.
    """
    trap_negative_indices(graph.graph)
    graph.recompile()
    graph.meta[TRAPS] = True


def _counts_from_the_end(node: torch.fx.Node) -> bool:
    """Whether eager takes negative indices of what ``node`` was before it was decomposed."""
    original = getattr(node.meta.get("original_aten"), "_schema", None)
    return (original.name if original is not None else operator_name(node)) in _LISTED


def classes_of(node: torch.fx.Node) -> list[tuple[torch.fx.Node, Any, int]]:
    """(labels, of how many classes, the label that is skipped) of a loss that picks by them."""
    place = _LOSSES.get(operator_name(node))
    if place is None:
        return []
    given: Any = node.args
    scores = given[place - 1].meta["val"]
    return [(given[place], scores.shape[1 if scores.dim() > 1 else 0], int(given[place + 3]))]


def _trap(
    graph: torch.fx.Graph, node: torch.fx.Node, index: torch.fx.Node, rows: Any, skipped: int | None
) -> None:
    """Puts a number that is too large in the place of negative ones, but for ``skipped``."""
    value = index.meta["val"]
    past = rows if isinstance(rows, int) else torch.iinfo(value.dtype).max
    with graph.inserting_before(node):
        negative = called(graph, _aten.lt.Scalar, index, 0)
        if skipped is not None and skipped < 0:
            counts = called(graph, _aten.ne.Scalar, index, skipped)
            negative = called(graph, _aten.logical_and.default, negative, counts)
        end = graph.call_function(
            _aten.full.default, ([], past), {"dtype": value.dtype, "device": value.device}
        )
        end.meta["val"] = value.new_empty(())
        shown = called(graph, _aten.where.self, negative, end, index)
    node.replace_input_with(index, shown)


_Use = tuple[torch.fx.Node, Any, bool]


def _uses(node: torch.fx.Node) -> list[_Use]:
    """(index, of how many rows, whether it may count from the end) of what a node indexes with."""
    name = operator_name(node)
    given: Any = node.args
    if name in _LISTED:
        sizes = given[0].meta["val"].shape
        pairs = zip(given[1], sizes, strict=False)
        return [(index, rows, True) for index, rows in pairs if index is not None]
    if name not in _CHECKED:
        return []
    argument, dimension = _CHECKED[name]
    shape = given[0].meta["val"].shape
    rows = shape[0 if dimension is None else given[dimension]] if shape else 1
    return [(given[argument], int(rows) if dimension is None else rows, False)]


def indices_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What ``node`` indexes with; all that it takes where that is not told apart."""
    name = operator_name(node)
    if name in _LISTED:
        return [index for index in node.args[1] if index is not None]
    place = 1 if name == "aten::embedding_dense_backward" else _CHECKED.get(name, (None,))[0]
    return list(node.all_input_nodes) if place is None else [node.args[place]]


def _clamp(
    graph: torch.fx.Graph, node: torch.fx.Node, index: torch.fx.Node, ends: tuple[Any, Any]
) -> torch.fx.Node:
    """Puts what is inside in the place of an index; whether that is the same."""
    if not all(isinstance(end, int) for end in ends):
        raise CompileRefused(f"the forward indexes with data, by an open size ({node.target})")
    if index.meta["val"].dtype not in (torch.int32, torch.int64):
        raise CompileRefused(f"the forward indexes with data ({node.target})")
    with graph.inserting_before(node):
        inside = called(graph, _aten.clamp.default, index, *ends)
        same = called(graph, _aten.eq.Tensor, inside, index)
        flag = called(graph, _aten.all.default, same)
    node.replace_input_with(index, inside)
    return flag


def _range_of_input(index: Any, rows: Any) -> tuple[torch.fx.Node, int, int, int] | None:
    """(input, low, high, also) that keep an index below ``rows``, of a `shifted_input`."""
    found = shifted_input(index)
    if found is None or not isinstance(rows, int):
        return None
    source, least, most = found
    if most - least >= rows:
        return None
    return source, -least, rows - most, -least


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
