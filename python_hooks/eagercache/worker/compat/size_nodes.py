"""Open sizes as nodes of a graph that is given tensors alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.fx


def is_size(node: Any) -> bool:
    """Whether a node of a traced graph is a number that depends on open sizes."""
    return hasattr(node, "meta") and hasattr(node.meta.get("val"), "node")


class SizeNodes:
    """Makes sizes anew, of those of the tensors that a graph is given.

    A graph that is cut in two hands sizes from one part to the other; kernels take tensors only.
    """

    def __init__(self, graph: torch.fx.Graph, given: Iterable[torch.fx.Node]) -> None:
        """``given``: the graph's placeholders, all of them tensors."""
        self._graph = graph
        self._made: dict[Any, torch.fx.Node] = {}
        self._places: dict[Any, tuple[torch.fx.Node, int]] = {}
        for node in given:
            for dimension, size in enumerate(node.meta["val"].size()):
                if hasattr(size, "node") and size.node.expr.is_symbol:
                    self._places.setdefault(size.node.expr, (node, dimension))

    def node_for(self, size: Any) -> torch.fx.Node | int:
        """A node with the value of a traced size. Raises ValueError where no tensor shows it."""
        import torch.fx
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        if not hasattr(size, "node"):
            return int(size)
        symbols = {symbol: self._symbol(symbol) for symbol in size.node.expr.free_symbols}
        proxies = {symbol: torch.fx.Proxy(node) for symbol, node in symbols.items()}
        made = sympy_interp(PythonReferenceAnalysis, proxies, size.node.expr)
        if not isinstance(made, torch.fx.Proxy):
            return int(made)
        made.node.meta["val"] = size
        return made.node

    def _symbol(self, symbol: Any) -> torch.fx.Node:
        import torch

        if symbol not in self._made:
            if symbol not in self._places:
                raise ValueError(f"no tensor has the size {symbol}")
            node, dimension = self._places[symbol]
            made = self._graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
            made.meta["val"] = node.meta["val"].size()[dimension]
            self._made[symbol] = made
        return self._made[symbol]
