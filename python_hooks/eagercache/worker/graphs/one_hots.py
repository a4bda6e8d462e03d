"""`one_hot` as a look-up of rows, so that its classes are checked as indices are.

Eager raises for a class outside. Where the operator is decomposed it only compares, and answers
with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from eagercache.worker.inductor.commands import CompileRefused

_aten = torch.ops.aten


def look_up_one_hots(exported: torch.fx.GraphModule) -> None:
    """Puts rows of an identity matrix in the place of each. The compiler compares in either case.

    Raises CompileRefused where it depends on data how many classes there are.
    """
    for part in exported.modules():  # blocks of autocast are graphs of their own
        if not isinstance(part, torch.fx.GraphModule):
            continue
        nodes = part.graph.find_nodes(op="call_function", target=_aten.one_hot.default)
        for node in nodes:
            _look_up(part.graph, node)
        if nodes:
            part.recompile()


def _look_up(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    classes, count = node.args if len(node.args) == 2 else (node.args[0], -1)
    assert isinstance(classes, torch.fx.Node)
    value: Any = classes.meta["val"]
    if not isinstance(count, int) or count < 1:
        raise CompileRefused(f"the forward's shapes depend on data ({node.target})")
    like = {"dtype": torch.int64, "device": value.device}
    with graph.inserting_before(node):
        rows = graph.call_function(_aten.eye.default, (count,), {**like, "pin_memory": False})
        made = graph.call_function(_aten.embedding.default, (rows, classes))
    with value.fake_mode:
        rows.meta["val"] = torch.eye(count, **like)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
