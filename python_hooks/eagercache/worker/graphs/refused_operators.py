"""Operators that no kernel of a module can have in it."""

from __future__ import annotations

import torch
import torch.fx

from eagercache.worker.graphs.custom_calls import is_custom
from eagercache.worker.graphs.nodes import (
    counts_from_the_storage,
    does_in_a_block,
    draws_numbers,
    operator_name,
)
from eagercache.worker.inductor.commands import CompileRefused


def refuse_operators(graph: torch.fx.Graph, *, draws: bool = False, custom: bool = False) -> None:
    """Raises CompileRefused for a graph that does more than compute.

    It may draw where it ``draws``, and call ``custom`` operators.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise CompileRefused(f"the forward {does_in_a_block(target)} ({target})")
        tags = getattr(target, "tags", ())
        if not draws and draws_numbers(node):
            raise CompileRefused(f"the forward draws random numbers ({target})")
        shapes_vary = (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        )
        if shapes_vary and operator_name(node) != "aten::index":  # looked at by its indices
            raise CompileRefused(f"the forward's shapes depend on data ({target})")
        if counts_from_the_storage(node):
            raise CompileRefused(f"it reads an argument's storage from its start ({target})")
        schema = getattr(target, "_schema", None)
        if schema is None:
            of_a_size = getattr(target, "__name__", "").startswith("sym_")
            if of_a_size or getattr(target, "__module__", "") in ("_operator", "builtins", "math"):
                continue
            raise CompileRefused(f"the forward uses {target}")
        if schema.is_mutable and not schema.name.startswith("aten::"):
            raise CompileRefused(f"the forward writes through {target}")
        if not schema.name.startswith(("aten::", "prims::")) and not (custom and is_custom(node)):
            raise CompileRefused(f"the forward calls the custom operator {target}")
