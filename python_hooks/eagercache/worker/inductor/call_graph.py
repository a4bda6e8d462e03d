"""The graph of one operator's call, which Inductor lowers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
import torch.fx

from eagercache.calls.call import Call
from eagercache.calls.description import TensorSpec
from eagercache.calls.numerics import in_double
from eagercache.worker.inductor.foreach import each_alone

# In a graph's metadata: code generated of it may check values as it runs, on a GPU.
TRAPS = "eagercache_traps"


def build_graph(
    call: Call, num_returns: int, sizes: Sequence[tuple[int, int]] = ()
) -> torch.fx.GraphModule:
    """The graph of one node: a placeholder per tensor, everything else baked in.

    It returns what the operator makes anew. What the operator writes the graph writes too: Inductor
    turns that into kernels that write their inputs. ``num_returns`` tells a list's length.
    ``sizes`` are (tensor, dimension) pairs whose values follow the tensors' in `Call.bind`.
    """
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"arg{i}") for i in range(len(call.tensors))]
    values = [
        _promote_as_number(graph, call, node, spec)
        for node, spec in zip(placeholders, call.tensors, strict=True)
    ]
    values += [
        graph.call_function(torch.ops.aten.sym_size.int, (placeholders[tensor], dimension))
        for tensor, dimension in sizes
    ]
    args, kwargs = call.bind(values)
    if call.name.startswith("aten::_foreach_"):
        parts = each_alone(graph, call.op, args, kwargs)
        if parts is not None:
            graph.output(tuple(parts) if call.fresh else ())
            return torch.fx.GraphModule(torch.nn.Module(), graph)
    if in_double(call):
        wide = graph.call_function(torch.ops.aten._to_copy.default, (args[0],), _DOUBLE)
        node = graph.call_function(call.op, (wide, *args[1:]), kwargs)
        made = [node]
        if len(call.op._schema.returns) > 1:
            made = [graph.call_function(operator.getitem, (node, i)) for i in (0, 1)]
        to = {"dtype": call.tensors[0].dtype}
        graph.output(
            tuple(graph.call_function(torch.ops.aten._to_copy.default, (m,), to) for m in made)
        )
        return torch.fx.GraphModule(torch.nn.Module(), graph)
    node = graph.call_function(_marked_form(call), tuple(args), kwargs)
    returns = call.op._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        graph.output((node,) if call.fresh else ())
    else:
        wanted = call.fresh if len(returns) > 1 else range(num_returns if call.fresh else 0)
        graph.output(tuple(graph.call_function(operator.getitem, (node, i)) for i in wanted))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


_DOUBLE = {"dtype": torch.float64}


def _marked_form(call: Call) -> torch._ops.OpOverload:
    """The operator, or one that does the same and whose schema marks what it writes."""
    if call.written and call.name == "aten::native_batch_norm":
        return torch.ops.aten._native_batch_norm_legit.default
    return call.op


def _category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def _promote_as_number(
    graph: torch.fx.Graph, call: Call, node: torch.fx.Node, spec: TensorSpec
) -> torch.fx.Node:
    """``node`` in a dtype that promotes as native lets a Python number promote.

    In the graph it is an ordinary 0-dim tensor, which outranks what a number does not: 0-dim
    tensors of its category, and the default dtype where no other argument is of its category.
    """
    if not spec.wrapped:
        return node
    category = _category(spec.dtype)
    others = [other for other in call.tensors if not other.wrapped]
    top = max((_category(other.dtype) for other in others), default=-1)
    peers = [other for other in others if _category(other.dtype) == max(top, category)]
    if any(other.sizes for other in peers):
        return node
    if top >= category:
        dtype = functools.reduce(torch.promote_types, [other.dtype for other in peers])
        if top > category:
            # Only a complex peer is raised by a float's width; integers and booleans have none.
            dtype = dtype.to_real() if category == 2 else spec.dtype
    elif category == 2:
        dtype = call.state.default_dtype
    elif category == 3:
        dtype = call.state.default_dtype.to_complex()
    else:
        return node
    if dtype == spec.dtype:
        return node
    return graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})


def example_inputs(call: Call) -> tuple[torch.Tensor, ...]:
    """Tensors of the call's metadata for tracing; numbers as 0-dim tensors of their own dtype."""
    sample = call.sample("ones", seed=0)
    return tuple(
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=spec.dtype)
        for value, spec in zip(sample.values, call.tensors, strict=True)
    )
