"""Means and variances of a traced graph in two passes, on CPU: first the mean, then what is left.

Inductor runs both together (Welford's way) and divides at every step: a batch norm's statistics
come out several times as far off as native's, which accumulates in double, and gradients with them.
Two sums, which kernels here add up in short chunks (`vector_math`), are as close.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

from eagercache.worker.graphs.nodes import called, operator_name

_aten = torch.ops.aten


def use_two_passes(graph: torch.fx.Graph) -> bool:
    """Rewrites a traced graph in place; False where nothing was to be done."""
    found = [node for node in graph.nodes if _is_of_this_kind(node)]
    for node in found:
        x, dimensions = node.args[:2]
        with graph.inserting_before(node):
            mean = called(graph, _aten.mean.dim, x, dimensions, True)
            centered = called(graph, _aten.sub.Tensor, x, mean)
            squares = called(graph, _aten.mul.Tensor, centered, centered)
            variance = called(graph, _aten.mean.dim, squares, dimensions, True)
        for user in list(node.users):
            user.replace_all_uses_with((variance, mean)[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    return bool(found)


def _is_of_this_kind(node: torch.fx.Node) -> bool:
    if operator_name(node) != "aten::var_mean" or len(node.args) != 2:
        return False
    x = node.args[0]
    value = x.meta["val"] if isinstance(x, torch.fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        and bool(node.args[1])
        and node.kwargs.get("correction") == 0
        and node.kwargs.get("keepdim") is True
        and all(user.target is operator.getitem for user in node.users)
    )
