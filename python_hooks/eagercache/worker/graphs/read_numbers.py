"""Numbers that a forward reads of tensors and computes tensors with, as tensors of no dimensions.

`x * self.scale.item()`, and the share of a batch in an average over all of them, 1 / float(count).
Such a number is data, of which no size or branch is made here: the graph has it as a tensor, in the
precision that Python has it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import operator_name

_aten = torch.ops.aten
_READS = ("aten::item", "aten::_local_scalar_dense")
# What Python computes of two numbers of its own as a tensor of float64 does, without raising.
_COMPUTED = {
    operator.add: _aten.add.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.mul: _aten.mul.Tensor,
}
# Where a number stands beside a tensor.
_BESIDE = ("aten::add", "aten::sub", "aten::mul", "aten::div")
_FLOATS = (torch.float32, torch.float64)
# A count that is divided by is below this.
_MOST = 1 << 31


def numbers_as_tensors(exported: torch.fx.GraphModule) -> None:
    """Puts a tensor in the place of each such number; leaves those that are used otherwise."""
    graph = exported.graph
    reads = [node for node in graph.nodes if operator_name(node) in _READS]
    changed = [_Number(graph, node).replace() for node in reads]
    if any(changed):
        graph.lint()
        exported.recompile()


class _Number:
    """One that is read, with all that is computed of it."""

    def __init__(self, graph: torch.fx.Graph, read: torch.fx.Node) -> None:
        self._graph = graph
        self._read = read
        self._numbers = {read}
        source: Any = read.args[0]
        self._device = source.meta["val"].device
        self._fake_mode = source.meta["val"].fake_mode
        self._uses: list[torch.fx.Node] = []

    def replace(self) -> bool:
        """Whether a tensor is there now."""
        source: Any = self._read.args[0]
        value = source.meta["val"]
        integer = value.dtype == torch.int64
        if not (integer or value.dtype in _FLOATS) or value.numel() != 1 or not self._collect():
            return False
        made: dict[torch.fx.Node, torch.fx.Node] = {}
        with self._graph.inserting_before(self._read):
            flat = self._call(_aten.reshape.default, self._call(_aten.detach.default, source), [])
            # A copy: the tensor may be written later.
            dtype = torch.int64 if integer else torch.float64
            made[self._read] = self._copy(flat, dtype)
        in_order = [node for node in self._graph.nodes if node in self._numbers]
        for node in in_order[1:]:
            with self._graph.inserting_before(node):
                made[node] = self._computed(node, made)
        for node in self._uses:
            with self._graph.inserting_before(node):
                dtype = node.meta["val"].dtype
                node.args = tuple(
                    self._copy(made[part], dtype) if part in made else part for part in node.args
                )
        for node in reversed(in_order):
            self._graph.erase_node(node)
        return True

    def _collect(self) -> bool:
        """Finds what is computed. Whether all of it can be computed of tensors."""
        waiting = [self._read]
        while waiting:
            for user in waiting.pop().users:
                if user.op != "call_function" or user.kwargs:
                    return False
                if operator_name(user) in _BESIDE:
                    if not self._is_beside(user):
                        return False
                    self._uses.append(user)
                elif self._is_number(user):
                    self._numbers.add(user)
                    waiting.append(user)
                else:
                    return False
        return True

    def _is_beside(self, user: torch.fx.Node) -> bool:
        """Whether a tensor's operator takes the number as its second operand."""
        if len(user.args) != 2 or user.args[0] in self._numbers:
            return False
        first: Any = user.args[0]
        value = first.meta.get("val") if isinstance(first, torch.fx.Node) else None
        return (
            isinstance(value, torch.Tensor)
            and value.dtype in _FLOATS
            and value.device == self._device
            and user.meta["val"].dtype == value.dtype
        )

    def _is_number(self, user: torch.fx.Node) -> bool:
        if user.target is torch.sym_float:
            return True
        parts = user.args
        known = all(part in self._numbers or type(part) is float for part in parts)
        # Of integers Python computes without any bound.
        if len(parts) != 2 or not known or any(map(self._is_count, parts)):
            return False
        return user.target in _COMPUTED or (
            user.target is operator.truediv and self._counts(parts[1]) is not None
        )

    def _is_count(self, part: Any) -> bool:
        return isinstance(part, torch.fx.Node) and not isinstance(
            part.meta["val"], (float, torch.SymFloat)
        )

    def _counts(self, part: Any) -> torch.fx.Node | None:
        """The integer on a CPU that a number to divide by is: where it is 0, Python raises."""
        if not isinstance(part, torch.fx.Node) or part.target is not torch.sym_float:
            return None
        source: Any = self._read.args[0]
        is_count = part.args[0] is self._read and source.meta["val"].dtype == torch.int64
        return self._read if is_count and source.meta["val"].is_cpu else None

    def _computed(
        self, node: torch.fx.Node, made: dict[torch.fx.Node, torch.fx.Node]
    ) -> torch.fx.Node:
        given = [
            made[part] if isinstance(part, torch.fx.Node) else self._constant(part)
            for part in node.args
        ]
        if node.target is torch.sym_float:
            return self._copy(given[0], torch.float64)
        if node.target is not operator.truediv:
            return self._call(_COMPUTED[node.target], *given)
        return self._call(_aten.div.Tensor, given[0], self._not_zero(given[1], made[self._read]))

    def _not_zero(self, number: torch.fx.Node, count: torch.fx.Node) -> torch.fx.Node:
        """``number``, where ``count`` is in [1, `_MOST`]: before a call, an index is compared."""
        zeros = self._graph.call_function(_aten.zeros.default, ([1],), {"dtype": torch.float64})
        zeros.meta["val"] = number.meta["val"].new_zeros([1])
        rows = self._call(_aten.expand.default, zeros, [_MOST])
        index = self._call(_aten.add.Tensor, count, -1)
        index = self._call(_aten.reshape.default, index, [1])
        chosen = self._call(_aten.index_select.default, rows, 0, index)
        return self._call(_aten.add.Tensor, number, self._call(_aten.reshape.default, chosen, []))

    def _constant(self, value: Any) -> torch.fx.Node:
        like = {"dtype": torch.float64, "device": self._device}
        node = self._graph.call_function(_aten.full.default, ([], value), like)
        with self._fake_mode:
            node.meta["val"] = torch.full([], value, **like)
        return node

    def _copy(self, node: Any, dtype: torch.dtype) -> torch.fx.Node:
        made = self._graph.call_function(_aten._to_copy.default, (node,), {"dtype": dtype})
        made.meta["val"] = node.meta["val"].to(dtype, copy=True)
        return made

    def _call(self, target: Any, *args: Any) -> torch.fx.Node:
        made = self._graph.call_function(target, args)
        given = [part.meta["val"] if isinstance(part, torch.fx.Node) else part for part in args]
        made.meta["val"] = target(*given)
        return made
