"""A module's call that needs gradients turned into two graphs: its forward and its backward.

Both are parts of one traced graph. The forward gives the call's answer, the new values of the
buffers that it writes, and what the backward will read; the backward takes that and the gradients
of the answer, and gives those of the parameters and arguments that need one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from eagercache.callables.answer_structure import Structure
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity
from eagercache.callables.module_stores import ModuleStores
from eagercache.callables.objects import CallObjects, Change
from eagercache.calls.texts import named_line
from eagercache.worker.compat import checkpoints, traced_graphs
from eagercache.worker.graphs.dropout_masks import (
    Draw,
    Noise,
    drawn_layouts,
    drawn_within,
    keep_draws,
    noise_as_drawn,
    number_layouts,
)
from eagercache.worker.graphs.indices import refuse_data_checks
from eagercache.worker.graphs.layout import in_strides, use_channels_last
from eagercache.worker.graphs.nodes import operator_name
from eagercache.worker.graphs.pool_gradients import use_pools_for_gradients
from eagercache.worker.graphs.rebuilt import read_as
from eagercache.worker.graphs.refused_operators import refuse_operators
from eagercache.worker.graphs.two_pass_variance import use_two_passes
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.class_rows import class_rows
from eagercache.worker.modules.exported import export_strictly, read_outputs
from eagercache.worker.modules.joint_inputs import Inputs, read_inputs
from eagercache.worker.modules.joint_split import Splitter
from eagercache.worker.modules.opened import (
    OpenedCall,
    check_constructors,
    with_objects,
    without_empty_parts,
)
from eagercache.worker.modules.symbolic import dynamic_shapes, symbolic_sizes
from eagercache.worker.modules.training_graphs import TrainingGraphs


@dataclass(frozen=True)
class OpenedAnswer:
    """An answer with objects which the forward made, or of a call with objects or with stores.

    Attributes:
        answer: of a run.
        structure: how it is built of its leaves.
        in_objects: for each tensor among these, and then of the stores, whether an object holds it.
        changes: what it assigned to attributes of modules.
        stores: where it assigns.
    """

    answer: Any
    structure: Structure
    in_objects: list[bool]
    changes: tuple[Change, ...] = ()
    stores: ModuleStores | None = None

    def written(self, outputs: str) -> str:
        """The text of `read_outputs`, with all of this. Raises CompileRefused."""
        return with_objects(outputs, self.answer, self.structure, self.changes, self.stores)


def trace_training(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    identity: Identity,
    eager_saves: Collection[int],
    differentiable: Sequence[bool],
    keeps_output: Sequence[bool],
    strides: Sequence[Sequence[int]],
    fits: Callable[[TrainingGraphs], bool],
    opened: OpenedAnswer | None = None,
    open_sizes: Sequence[tuple[int, int]] = (),
) -> TrainingGraphs:
    """Traces one call with its gradients.

    ``eager_saves`` holds the addresses of the tensors' memory that autograd keeps after the
    module's own forward: only of those the backward reads the memory itself, so that writing to
    another one in between is as harmless as it was. ``keeps_output`` says the same of the answer's
    tensors, ``differentiable`` which of them have gradients of their own, and ``strides`` how the
    forward lays them out, which tracing does not always foresee. ``opened`` is an answer that holds
    objects, or of a call with objects. Where the first split does not ``fit``, the result is
    another one that keeps less. ``open_sizes`` are those that `trace_module` leaves open. Raises
    CompileRefused.
    """
    objects = CallObjects(args, kwargs)
    program, guards, args, kwargs = _exported(module, args, kwargs, opened, open_sizes)
    inputs = read_inputs(program, args, kwargs, identity, sizes_open=bool(open_sizes))
    symbolic = symbolic_sizes(inputs.of_arguments, open_sizes) if open_sizes else None
    outputs, answers = read_outputs(program.graph, program.call_spec.out_spec)
    if len(answers) != len(differentiable):
        raise CompileRefused("the traced graph returns another number of tensors")
    in_objects = [False] * len(answers)
    apart = [not traced for traced in differentiable]
    if opened is not None:
        outputs = opened.written(outputs)
        rows = class_rows(objects, opened.structure)
        guards = (*guards, *(tuple(row.to_row()) for row in rows))
        in_objects = opened.in_objects
        apart = [either or held for either, held in zip(apart, in_objects, strict=True)]
    buffers = [
        index
        for index, source in enumerate(inputs.sources)
        if isinstance(source, tuple) and source[0] and identity.slots[source[1]].kind == "buffer"
    ]
    wanted = list(zip(answers, strides, apart, strict=True))
    joint = _trace_joint(program, inputs, wanted, buffers, sizes_open=symbolic is not None)
    written = _keep_written(joint, len(answers), buffers)
    draws = _rewrite(joint, program, inputs, sizes_open=symbolic is not None)
    reads = read_as(joint.graph, inputs.arguments()) if symbolic is None else {}
    kept = _kept(inputs, eager_saves, written, _read_again(program, inputs, written))
    outputs_kept = [index for index, keeps in enumerate(keeps_output) if keeps]
    outputs_made = len(answers) + len(written)

    def split(leaner: bool) -> TrainingGraphs:
        forward, backward = keep_draws(
            joint,
            lambda: traced_graphs.split_joint_graph(
                joint, outputs_made, kept, outputs_kept, leaner=leaner
            ),
        )
        splitter = Splitter(forward, backward, inputs, reads)
        splitter.in_objects = tuple(in_objects)
        splitter.redraws = checkpoints.has_checkpoints(program.graph)
        return splitter.graphs(outputs, written, kept, differentiable, keeps_output, draws)

    graphs = split(leaner=False)
    if not fits(graphs):
        graphs = split(leaner=True)
    if symbolic is not None:
        graphs.see_sizes(symbolic, strides)
    return replace(graphs, guards=guards, symbolic=symbolic)


def _rewrite(
    joint: torch.fx.GraphModule,
    program: torch.export.ExportedProgram,
    inputs: Inputs,
    *,
    sizes_open: bool,
) -> list[Draw]:
    """Has masks be inputs, and operators others; what the forward draws itself."""
    draws = drawn_within(joint.graph)
    if draws and checkpoints.has_checkpoints(program.graph):
        raise CompileRefused("attention draws within parts under torch.utils.checkpoint")
    if not draws:
        devices = {value.device.type for value in inputs.values}
        noise = noise_as_drawn(joint, number_layouts(program.graph), devices)
        inputs.add_noise(noise, _drawn(joint, noise, sizes_open=sizes_open))
    refuse_operators(joint.graph, draws=bool(draws))
    changed = use_two_passes(joint.graph)
    if not sizes_open:
        changed |= use_pools_for_gradients(joint.graph)
    if changed:
        joint.recompile()
    return draws


def _drawn(
    joint: torch.fx.GraphModule, noise: Sequence[Noise], *, sizes_open: bool
) -> list[torch.Tensor]:
    """What a call draws, or where its sizes are open what stands for that."""
    if not sizes_open:
        return [one.draw() for one in noise]
    inputs = joint.graph.find_nodes(op="placeholder")
    given = [node for node in inputs if not traced_graphs.is_tangent(node)]
    return [node.meta["val"] for node in given[len(given) - len(noise) :]]


def _exported(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opened: OpenedAnswer | None,
    open_sizes: Sequence[tuple[int, int]],
) -> tuple[torch.export.ExportedProgram, Any, tuple[Any, ...], dict[str, Any]]:
    """The traced call, its guards, and the arguments that the program takes."""
    traced: torch.nn.Module = module
    if opened is not None:
        objects = CallObjects(args, kwargs).found
        if objects and open_sizes:
            raise CompileRefused("sizes are open, and it is called with an object")
        check_constructors(objects)
        traced = OpenedCall(module, args, kwargs, opened.changes, opened.structure)
        args, kwargs = tuple(argument_tensors(args, kwargs)), {}
    try:
        given = argument_tensors(args, kwargs)
        shapes = dynamic_shapes(traced, args, kwargs, given, open_sizes)
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {named_line(error)}") from error
    with (
        torch.enable_grad(),
        traced_graphs.noted_custom_gradients() as met,
        checkpoints.noted_checkpoints() as reasons,
    ):
        program, guards = export_strictly(traced, args, kwargs, shapes, module)
    if reasons:
        raise CompileRefused(reasons[0])
    if met:
        raise CompileRefused("it calls a torch.autograd.Function, whose backward no trace has")
    refuse_data_checks(program.graph_module)
    if opened is not None:
        without_empty_parts(program.graph)
        _drop_metadata_checks(program.graph)
        program.graph_module.recompile()
    return program, guards, args, kwargs


def _read_again(
    program: torch.export.ExportedProgram, inputs: Inputs, written: Collection[int]
) -> set[int]:
    """The inputs that parts read which the backward computes again. Raises CompileRefused."""
    graph = program.graph
    if not checkpoints.has_checkpoints(graph):
        return set()
    placeholders = graph.find_nodes(op="placeholder")
    names = [placeholders[position].name for position in inputs.positions]
    if checkpoints.is_written_twice(graph, {names[index] for index in written}):
        raise CompileRefused("torch.utils.checkpoint would write its buffers twice")
    again = checkpoints.read_again(graph)
    return {index for index, name in enumerate(names) if name in again}


def _kept(
    inputs: Inputs, eager_saves: Collection[int], written: Collection[int], again: Collection[int]
) -> set[int]:
    """The inputs whose memory the backward may read; ``again`` are read to compute again."""
    return {
        index
        for index, value in enumerate(inputs.values)
        if isinstance(inputs.sources[index], Noise)
        or index in again
        or (value.untyped_storage().data_ptr() in eager_saves and index not in written)
    }


def _drop_metadata_checks(graph: torch.fx.Graph) -> None:
    """Of dtype and device, which are each call's; that of a constant cannot be compiled."""
    for node in list(graph.nodes):
        if operator_name(node) == "aten::_assert_tensor_metadata":
            graph.erase_node(node)


def _trace_joint(
    program: torch.export.ExportedProgram,
    inputs: Inputs,
    answers: Sequence[tuple[int, Sequence[int], bool]],
    buffers: Sequence[int],
    *,
    sizes_open: bool,
) -> torch.fx.GraphModule:
    """One graph: the answer's tensors, every buffer's value afterwards, and all gradients.

    ``answers``: the place of each tensor among what the program returns, its strides, and whether
    it has no gradient here: an object holds it, say.
    """
    called = program.graph_module
    other = torch.fx.GraphModule(called, copy.deepcopy(called.graph))
    try:
        if not sizes_open and use_channels_last(other.graph):
            other.recompile()
            with contextlib.suppress(Exception):
                joint = _trace_called(other, program, inputs, answers, buffers)
                # Where a mask's numbers lie depends on its layout.
                if all(
                    layouts(joint.graph) == layouts(program.graph)
                    for layouts in (drawn_layouts, number_layouts)
                ):
                    return joint
        if sizes_open:  # where strides are, too: those of the trace are looked at afterwards
            answers = [(place, (), apart) for place, _, apart in answers]
        return _trace_called(called, program, inputs, answers, buffers)
    except CompileRefused:
        raise
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {named_line(error)}") from error


def _trace_called(
    called: torch.fx.GraphModule,
    program: torch.export.ExportedProgram,
    inputs: Inputs,
    answers: Sequence[tuple[int, Sequence[int], bool]],
    buffers: Sequence[int],
) -> torch.fx.GraphModule:
    """`_trace_joint` of the program's graph, or of one that stands for it."""
    run: Callable[..., Any] = called
    if checkpoints.has_checkpoints(called.graph):
        run = checkpoints.with_tags(called).run

    def forward(*values: torch.Tensor) -> list[torch.Tensor]:
        own = list(values)
        for index in buffers:
            own[index] = own[index].clone()
        everything = list(inputs.fixed)
        for position, value in zip(inputs.positions, own, strict=True):
            everything[position] = value
        given = run(*everything)
        return [
            # A clone: what may show an input is not traced, and a linear layer's answer may.
            *(
                _laid_out(given[i].detach() if apart else given[i], wanted).clone()
                for i, wanted, apart in answers
            ),
            *(own[i].detach() for i in buffers),
        ]

    joint = traced_graphs.joint_graph(forward, tuple(inputs.traced))
    _drop_clones(joint, len(answers))
    return joint


def _laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`in_strides`, where there are any."""
    return in_strides(tensor, strides) if strides else tensor


def _drop_clones(joint: torch.fx.GraphModule, answers: int) -> None:
    """Returns what the answers are clones of, which is no input and each another node."""
    graph = joint.graph
    (output,) = graph.find_nodes(op="output")
    values = list(output.args[0])
    for index, node in enumerate(values[:answers]):
        behind = node.args[0] if operator_name(node) == "aten::clone" else node
        while operator_name(behind) in ("aten::detach", "aten::alias"):
            behind = behind.args[0]
        if behind.op == "call_function" and behind not in values and len(node.kwargs) == 0:
            values[index] = behind
    output.args = (values,)
    graph.eliminate_dead_code()
    joint.recompile()


def _keep_written(joint: torch.fx.GraphModule, answers: int, buffers: Sequence[int]) -> list[int]:
    """Leaves only the written buffers among the outputs; which of the inputs they are."""
    graph = joint.graph
    (output,) = graph.find_nodes(op="output")
    values = list(output.args[0])
    placeholders = graph.find_nodes(op="placeholder")
    written, kept = [], []
    for index, value in zip(buffers, values[answers : answers + len(buffers)], strict=True):
        node = value
        while operator_name(node) in ("aten::alias", "aten::clone", "aten::detach"):
            node = node.args[0]
        if node is not placeholders[index]:
            written.append(index)
            kept.append(value)
    output.args = ([*values[:answers], *kept, *values[answers + len(buffers) :]],)
    _read_through_copies(graph, [placeholders[index] for index in buffers if index not in written])
    graph.eliminate_dead_code()
    joint.recompile()
    return written


def _read_through_copies(graph: torch.fx.Graph, unwritten: Collection[torch.fx.Node]) -> None:
    """Lets what reads a copy read the tensor itself, and the memory of ``unwritten`` inputs.

    Nothing is written in such a graph. Of a tensor and its copy, as a dropout of nothing makes one,
    both would be kept for the backward. A copy that is returned is read itself: it lasts anyway.
    """
    for node in graph.nodes:
        returned = any(user.op == "output" for user in node.users)
        if operator_name(node) != "aten::clone" or returned:
            continue
        source = node.args[0]
        if source.op == "placeholder" and source not in unwritten:
            continue
        if node.meta["val"].stride() == source.meta["val"].stride():
            node.replace_all_uses_with(source)
