"""Bags of embeddings that are all of one length, as rows of a table and their sums."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import called, operator_name

_aten = torch.ops.aten
# By the number that `embedding_bag` has for its mode. "max" (2) is left to native.
_REDUCTIONS = {0: _aten.sum.dim_IntList, 1: _aten.mean.dim}
# What `embedding_bag` takes behind the table, the indices and the offsets.
_NAMES = (
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)


def sum_equal_bags(graph: torch.fx.Graph) -> bool:
    """Writes bags of equal length as a look-up of rows and a reduction; whether there were some.

    `nn.EmbeddingBag` makes such bags of indices with two dimensions. Generated code has both
    operators and their gradients, and fuses them with what is around; it cannot call the gradient
    of native's kernel of bags.
    """
    bags = [node for node in graph.nodes if operator_name(node) == "aten::embedding_bag"]
    rewritten = [_rewrite(graph, node) for node in bags]
    return any(rewritten)


def _rewrite(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    table, indices, offsets, *given = node.args
    options = {**dict(zip(_NAMES, given, strict=False)), **node.kwargs}
    padding = options.pop("padding_idx", None)
    reduction = _REDUCTIONS.get(options.pop("mode", 0))
    length = _length(indices, offsets)
    answers = [user for user in node.users if user.args[1] == 0]
    unread = [user for user in node.users if user.args[1] != 0]
    if reduction is None or length is None or any(user.users for user in unread):
        return False
    if any(options.values()) or padding is not None:
        return False
    with graph.inserting_before(node):
        bags = called(graph, _aten.view.default, indices, [-1, length])
        rows = called(graph, _aten.embedding.default, table, bags)
        answer = called(graph, reduction, rows, [1])
    for user in answers:
        user.replace_all_uses_with(answer)
    for dead in (*answers, *unread, node):
        graph.erase_node(dead)
    return True


def _length(indices: Any, offsets: Any) -> int | None:
    """How many indices each bag has, if the graph itself says that all have as many."""
    if operator_name(offsets) != "aten::arange" or len(offsets.args) != 3:
        return None
    start, _, length = offsets.args
    values = indices.meta["val"]
    if start != 0 or not isinstance(length, int) or values.dim() != 1:
        return None
    # Asking two open sizes whether they are equal would assume it: their texts say it.
    bags = offsets.meta["val"].shape[0]
    return length if str(values.shape[0]) == str(bags * length) else None
