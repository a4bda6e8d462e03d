"""What of a module's graph depends on its weights alone, as a graph of its own.

Such values (a weight cast for autocast, weights put together, a table that is looked up by
positions) are computed once for each version of the weights, not in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import ancestors
from eagercache.worker.modules.trace import ModuleGraph

# What is folded may take so many times the memory of the weights that it is made of: a value that
# is larger than what makes it is made again, in the kernel that reads it.
MOST_GROWTH = 2.0


@dataclass(frozen=True)
class Source:
    """Where an input of the main graph comes from: "slot", "argument" or "folded", and which."""

    kind: str
    index: int


@dataclass(frozen=True)
class Split:
    """A module's graph in two.

    Attributes:
        main: computes the answer; its inputs are ``sources``.
        fold: computes the folded values out of the slots ``fold_slots``; None when there are none.
        folded: those values, for the tensors that the module holds now.
        examples: the tensors for ``main``'s placeholders, fake where sizes are open.
    """

    main: torch.fx.GraphModule
    sources: tuple[Source, ...]
    examples: tuple[torch.Tensor, ...]
    fold: torch.fx.GraphModule | None = None
    fold_slots: tuple[int, ...] = ()
    fold_examples: tuple[torch.Tensor, ...] = ()
    folded: tuple[torch.Tensor, ...] = ()


def split_weights(traced: ModuleGraph, slots: Sequence[torch.Tensor]) -> Split:
    """Takes out of a traced call what its weights alone decide. ``slots``: the module's tensors."""
    placeholders = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
    origin = dict(zip(placeholders, traced.inputs, strict=True))
    values = _weights_values(traced.graph, origin, slots)
    chosen = _worth_folding(traced.graph, origin, values)
    sources = {
        node: Source("slot" if of_module else "argument", index)
        for node, (of_module, index) in origin.items()
    }
    sources.update({node: Source("folded", i) for i, node in enumerate(chosen)})
    open_sizes = traced.symbolic is not None
    examples = dict(zip(placeholders, traced.examples, strict=True))
    for node in chosen:
        examples[node] = node.meta["val"] if open_sizes else values[node]
    main, taken = _main_graph(traced.graph, placeholders, chosen)
    split = Split(
        main=main,
        sources=tuple(sources[node] for node in taken),
        examples=tuple(examples[node] for node in taken),
    )
    if not chosen:
        return split
    fold, read = _fold_graph(traced.graph, placeholders, chosen)
    fold_slots = tuple(origin[node][1] for node in read)
    return Split(
        split.main,
        split.sources,
        split.examples,
        fold,
        fold_slots,
        tuple(slots[index] for index in fold_slots),
        tuple(values[node] for node in chosen),
    )


def _weights_values(
    module: torch.fx.GraphModule,
    origin: dict[torch.fx.Node, tuple[bool, int]],
    slots: Sequence[torch.Tensor],
) -> dict[torch.fx.Node, Any]:
    """The values of all nodes that no argument has a part in."""
    values: dict[torch.fx.Node, Any] = {}
    if _writes_constants(module.graph, origin):
        return values
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder" and origin[node][0]:
                values[node] = slots[origin[node][1]].detach()
            elif node.op == "get_attr":
                values[node] = getattr(module, node.target)
            elif node.op == "call_function" and all(n in values for n in node.all_input_nodes):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def _writes_constants(graph: torch.fx.Graph, origin: dict[torch.fx.Node, tuple[bool, int]]) -> bool:
    """Whether some operator writes into what no argument has a part in: nothing is folded then."""
    apart = set()
    for node in graph.nodes:
        of_module = node.op == "get_attr" or (node.op == "placeholder" and origin[node][0])
        computed = node.op == "call_function"
        if of_module or (computed and all(n in apart for n in node.all_input_nodes)):
            apart.add(node)
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        given = dict(node.kwargs)
        given.update(zip((a.name for a in schema.arguments), node.args, strict=False))
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and given.get(argument.name) in apart:
                return True
    return False


def _worth_folding(
    module: torch.fx.GraphModule,
    origin: dict[torch.fx.Node, tuple[bool, int]],
    values: dict[torch.fx.Node, Any],
) -> list[torch.fx.Node]:
    """Nodes to be inputs of the main graph: computed of weights, and read by what is not."""
    memory = {
        node: {tensor.untyped_storage().data_ptr() for tensor in _tensors(value)}
        for node, value in values.items()
    }
    weights: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}
    views: set[torch.fx.Node] = set()
    for node in values:
        below = [weights[n] for n in node.all_input_nodes]
        weights[node] = frozenset({node}) if node.op == "placeholder" else frozenset().union(*below)
        known = set().union(*(memory[n] for n in node.all_input_nodes))
        if node.target is operator.getitem or (known and memory[node] <= known):
            views.add(node)
    chosen: dict[torch.fx.Node, None] = {}
    for node in values:
        if all(user in values for user in node.users):
            continue
        source = node
        while source in views and source.target is not operator.getitem:
            (source,) = [n for n in source.all_input_nodes if memory[source] <= memory[n]][:1]
        if source.op != "call_function" or not isinstance(values[source], torch.Tensor):
            continue
        if any(user.op == "output" for user in (*node.users, *source.users)):
            continue
        size = values[source].untyped_storage().nbytes()
        of_weights = sum(values[n].numel() * values[n].element_size() for n in weights[source])
        if 0 < size <= MOST_GROWTH * of_weights:
            chosen[source] = None
    return list(chosen)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _main_graph(
    module: torch.fx.GraphModule,
    placeholders: Sequence[torch.fx.Node],
    chosen: Sequence[torch.fx.Node],
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """The graph with ``chosen`` as inputs, and the nodes of the old one that are its inputs."""
    graph = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in placeholders:
        made[node] = graph.node_copy(node, made.__getitem__)
    for index, node in enumerate(chosen):
        made[node] = graph.placeholder(f"folded_{index}")
        made[node].meta.update(node.meta)
    for node in module.graph.nodes:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.eliminate_dead_code()
    taken = []
    for node in (*placeholders, *chosen):
        if made[node].users:
            taken.append(node)
        else:
            graph.erase_node(made[node])
    graph.lint()
    return torch.fx.GraphModule(module, graph), taken


def _fold_graph(
    module: torch.fx.GraphModule,
    placeholders: Sequence[torch.fx.Node],
    chosen: Sequence[torch.fx.Node],
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """A graph that gives ``chosen``, and the placeholders that it reads."""
    needed = ancestors(*chosen)
    graph = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in chosen))
    graph.lint()
    return torch.fx.GraphModule(module, graph), [n for n in placeholders if n in needed]
