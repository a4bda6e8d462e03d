"""A graph that writes into tensors of its call (a cache of fixed size), or of the module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from eagercache.callables.written_tensors import Write
from eagercache.calls.texts import first_line
from eagercache.worker.inductor.commands import CompileRefused

_OF_ARGUMENTS, _OF_BUFFERS = "USER_INPUT_MUTATION", "BUFFER_MUTATION"


def holds_blocks_of_autocast(graph: torch.fx.Graph) -> bool:
    """Whether the forward turns autocast on or off: its operators stand in a graph of their own."""
    block = torch.ops.higher_order.wrap_with_autocast
    return any(node.target is block for node in graph.nodes)


def without_writes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program, whose graph returns what it would write: no value changes in the graph.

    Blocks of autocast are casts in it then.
    """
    try:
        return program.run_decompositions({})
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {first_line(error)}") from error


def is_write(spec: torch.export.graph_signature.OutputSpec) -> bool:
    """Whether an output of `without_writes` is a new value of an input."""
    return spec.kind.name in (_OF_ARGUMENTS, _OF_BUFFERS)


def write_at_the_end(
    program: torch.export.ExportedProgram,
    sources: dict[str, tuple[bool, int]],
    writes: Sequence[Write],
) -> None:
    """Has the graph copy new values into its inputs, which Inductor makes writes in place again.

    ``sources``: where each placeholder's tensor comes from, by its name. Raises CompileRefused
    unless these are the writes that a run of the forward was seen to make.
    """
    graph = program.graph
    (output,) = graph.find_nodes(op="output")
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    buffers = program.graph_signature.inputs_to_buffers
    names = {target: name for name, target in buffers.items()}
    specs = program.graph_signature.output_specs
    rest, written = [], []
    for spec, value in zip(specs, output.args[0], strict=True):
        if not is_write(spec):
            rest.append(value)
            continue
        assert spec.target is not None
        with graph.inserting_before(output):
            name = names[spec.target] if spec.kind.name == _OF_BUFFERS else spec.target
            target = placeholders[name]
            copied = graph.call_function(torch.ops.aten.copy_.default, (target, value))
        copied.meta.update(target.meta)
        written.append(sources[name])
    if sorted(written) != [(write.of_module, write.index) for write in writes]:
        raise CompileRefused("the forward writes into other tensors when it is traced")
    output.args = (tuple(rest),)


def return_writes(graph: torch.fx.Graph) -> list[int]:
    """Has a graph of `write_at_the_end` return what it writes, behind its outputs.

    The result is the places of what it wrote among its inputs, for `write_returned`.
    """
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    copies = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if node.args[0] in placeholders
    ]
    output.args = ((*output.args[0], *(node.args[1] for node in copies)),)
    places = [placeholders.index(node.args[0]) for node in copies]
    for node in copies:
        graph.erase_node(node)
    return places


def write_returned(graph: torch.fx.Graph, places: Sequence[int]) -> None:
    """Has a graph write its last outputs into the inputs at ``places``, and return the others."""
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    outputs = list(output.args[0])
    rest = len(outputs) - len(places)
    for place, value in zip(places, outputs[rest:], strict=True):
        with graph.inserting_before(output):
            copied = graph.call_function(torch.ops.aten.copy_.default, (placeholders[place], value))
        copied.meta.update(placeholders[place].meta)
    output.args = (tuple(outputs[:rest]),)
