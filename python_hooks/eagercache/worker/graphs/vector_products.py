"""Products of one row with a matrix, on a GPU: sums that Inductor fuses with what stands around.

A decoding step of batch 1 is made of them. A library's kernel for each takes a launch that costs
the host more than the device, and reads small matrices at a tenth of the memory's speed. As a sum
over products, a row's normalization, its bias, its activation and the product of another matrix
with the same row are one kernel; large matrices are read as fast as by the library
(`bench/results/2026-11-25-vector-products.md`). Sums are taken in float32, as the library does.
"""

from __future__ import annotations

import torch
import torch.fx

from eagercache.worker.graphs.nodes import called, operator_name

_aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)


def use_vector_products(graph: torch.fx.Graph) -> bool:
    """Rewrites a traced graph in place; False where nothing was to be done."""
    found = [node for node in graph.nodes if _is_of_this_kind(node)]
    for node in found:
        row, matrix, *rest = node.args
        bias = rest[0] if rest else node.kwargs.get("bias")
        with graph.inserting_before(node):
            wide = called(
                graph,
                _aten.to.dtype,
                called(graph, _aten.unsqueeze.default, row, -2),
                torch.float32,
            )
            terms = called(
                graph, _aten.mul.Tensor, wide, called(graph, _aten.to.dtype, matrix, torch.float32)
            )
            total = called(graph, _aten.sum.dim_IntList, terms, [-1])
            if bias is not None:
                total = called(
                    graph,
                    _aten.add.Tensor,
                    total,
                    called(graph, _aten.to.dtype, bias, torch.float32),
                )
            product = called(graph, _aten.to.dtype, total, node.meta["val"].dtype)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    return bool(found)


def _is_of_this_kind(node: torch.fx.Node) -> bool:
    if operator_name(node) != "aten::linear":
        return False
    row, matrix = (
        value.meta["val"] if isinstance(value, torch.fx.Node) else None for value in node.args[:2]
    )
    return (
        isinstance(row, torch.Tensor)
        and isinstance(matrix, torch.Tensor)
        and row.device.type == "cuda"
        and row.dtype in _DTYPES
        and matrix.dtype == row.dtype
        and matrix.dim() == 2
        and all(isinstance(size, int) and size == 1 for size in row.shape[:-1])
    )
