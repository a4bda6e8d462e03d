"""Tensors that a graph has inside, as a forward makes them of numbers (``torch.tensor(1e-4)``)."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence

import torch
import torch.fx


def make_constant(module: torch.fx.GraphModule, node: torch.fx.Node, value: torch.Tensor) -> None:
    """Puts a copy of ``value`` into the module, in the place of an input of its graph."""
    _fill_in_number(module.graph, node, value)
    name = f"_eagercache_constant_{node.name}"
    module.register_buffer(name, value.detach().clone())
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta.update(node.meta)
    node.replace_all_uses_with(constant)
    module.graph.erase_node(node)


def constants_as_inputs(
    module: torch.fx.GraphModule,
) -> tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    """(a copy that is given its constants behind its inputs, these): a trace takes none inside."""
    lifted = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    graph, nodes, constants = lifted.graph, [], []
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, torch.Tensor):  # else a block's graph
            nodes.append(node)
            constants.append(value)
    _exchange(lifted, nodes, lambda node: graph.placeholder(f"constant_{node.name}"))
    return lifted, tuple(constants)


def inputs_as_constants(module: torch.fx.GraphModule, constants: Sequence[torch.Tensor]) -> None:
    """The way back: the last inputs of ``module`` are ``constants``, and none of its inputs."""
    graph = module.graph
    places = graph.find_nodes(op="placeholder")
    nodes = places[len(places) - len(constants) :]
    names = {node: f"_eagercache_{node.name}" for node in nodes}
    for node, value in zip(nodes, constants, strict=True):
        module.register_buffer(names[node], value)
    _exchange(module, nodes, lambda node: graph.get_attr(names[node]))


def _exchange(
    module: torch.fx.GraphModule,
    nodes: Sequence[torch.fx.Node],
    made: Callable[[torch.fx.Node], torch.fx.Node],
) -> None:
    """Puts another node in the place of each, behind the inputs."""
    graph = module.graph
    for node in nodes:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            other = made(node)
        other.meta.update(node.meta)
        node.replace_all_uses_with(other)
        graph.erase_node(node)
    module.recompile()


def _fill_in_number(graph: torch.fx.Graph, constant: torch.fx.Node, value: torch.Tensor) -> None:
    """Has a graph of `without_writes` make the number that it copies from a constant (`x[0] = 2`).

    Inductor takes such a constant for a number, which it cannot put into a part of a tensor.
    """
    if value.dim() > 0 or value.is_complex():
        return
    for copied in [node for node in constant.users if node.target is torch.ops.aten.clone.default]:
        options = {"dtype": value.dtype, "device": value.device}
        with graph.inserting_before(copied):
            number = graph.call_function(torch.ops.aten.full.default, ([], value.item()), options)
        number.meta.update(copied.meta)
        copied.replace_all_uses_with(number)
        graph.erase_node(copied)
