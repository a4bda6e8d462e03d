"""Labels: indices that pick a class, or are a number that says that there is none to pick.

A cross entropy is traced as gather(scores, where(labels != skipped, labels, 0)): what it reads is
inside as soon as every label is a class or that number, which is looked at before the call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import behind, operator_name

# With the tensor that is indexed, the dimension, and the index.
_PICKING = {"aten::gather", "aten::scatter"}
# What is traced without gradients has losses whole; their parts pick by labels.
_LOSSES = {"aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d"}


def picks_by_labels(graph: torch.fx.Graph) -> bool:
    """Whether ``graph`` has losses that have to be decomposed for their labels to be seen."""
    return any(operator_name(node) in _LOSSES for node in graph.nodes)


def label_range(node: torch.fx.Node) -> tuple[torch.fx.Node, int, int, int] | None:
    """(what holds the labels, low, high, skipped) of a node that picks by labels; else None.

    The first need not be a placeholder. Its values are in [low, high) or equal ``skipped``.
    """
    if operator_name(node) not in _PICKING:
        return None
    indexed, dimension, index = node.args[:3]
    if not isinstance(indexed, torch.fx.Node) or not isinstance(dimension, int):
        return None
    rows = indexed.meta["val"].shape[dimension]
    chosen = behind(index)
    if not isinstance(rows, int) or operator_name(chosen) != "aten::where":
        return None
    condition, labels, other = chosen.args
    if operator_name(condition) != "aten::ne" or _number(other) != 0:
        return None
    tested, skipped = condition.args[0], _number(condition.args[1])
    source, fills = _unpadded(labels)
    if skipped is None or behind(tested) is not behind(labels):
        return None
    if any(fill != skipped and not (fill is not None and 0 <= fill < rows) for fill in fills):
        return None
    return source, 0, rows, skipped


def _unpadded(node: Any) -> tuple[torch.fx.Node, list[int | None]]:
    """What ``node`` shows but for numbers that were put around it, and those."""
    fills: list[int | None] = []
    node = behind(node)
    while operator_name(node) == "aten::constant_pad_nd":
        fills.append(_number(node.args[2]) if len(node.args) > 2 else 0)
        node = behind(node.args[0])
    return node, fills


def _number(value: Any) -> int | None:
    """The integer that an argument is, maybe as a tensor of no dimensions."""
    if operator_name(value) == "aten::full" and not value.args[0]:
        value = value.args[1]
    elif operator_name(value) == "aten::scalar_tensor":
        value = value.args[0]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None
