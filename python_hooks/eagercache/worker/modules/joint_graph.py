"""A module's call that needs gradients turned into two graphs: its forward and its backward.

Both are parts of one traced graph. The forward gives the call's answer, the new values of the
buffers that it writes, and what the backward will read; the backward takes that and the gradients
of the answer, and gives those of the parameters and arguments that need one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from eagercache.callables.answer_structure import Structure
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity
from eagercache.callables.objects import CallObjects
from eagercache.worker.inductor import compat
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.dropout_masks import (
    Draw,
    Noise,
    drawn_layouts,
    drawn_within,
    keep_draws,
    take_noise,
)
from eagercache.worker.modules.indices import INDEXING, Range, index_ranges
from eagercache.worker.modules.labels import trap_negative_labels
from eagercache.worker.modules.layout import in_strides, is_channels_last, use_channels_last
from eagercache.worker.modules.nodes import is_made_here, operator_name
from eagercache.worker.modules.opened import (
    OpenedCall,
    class_rows,
    with_objects,
    without_empty_parts,
)
from eagercache.worker.modules.pool_gradients import use_pools_for_gradients
from eagercache.worker.modules.rebuilt import (
    VIEWS,
    WHOLE_VIEWS,
    Part,
    Rebuilt,
    copied,
    holds,
    part_of,
    read_as,
)
from eagercache.worker.modules.trace import (
    MAX_CONSTANT_BYTES,
    export_strictly,
    first_line,
    read_outputs,
    refuse_operators,
    source_of,
    state_value,
    user_leaves,
)
from eagercache.worker.modules.two_pass_variance import use_two_passes

_aten = torch.ops.aten

# What a backward uses as indices.
_INDEXING_BACKWARD = INDEXING | {
    "aten::embedding",
    "aten::embedding_dense_backward",
    "aten::index",
}


@dataclass(frozen=True)
class Saved:
    """Where one tensor comes from that the backward reads.

    ``kind``: "input" or "output" of the forward (the answer's tensors), or "made" for it alone.
    ``index`` counts within the kind.
    """

    kind: str
    index: int


@dataclass(frozen=True)
class TrainingGraphs:
    """A traced call.

    The forward's outputs are the tensors of the answer, the written buffers' new values and what is
    made for the backward, in this order; the backward's inputs are ``saved`` and the gradients of
    the outputs ``tangents``.

    Attributes:
        inputs: for each input of the forward (True, slot of the identity) or (False, argument).
        noise: the forward's further inputs: masks that a call draws before it, in this order.
        draws: or else what the forward itself draws, by native's operators and in this order.
        ranges: as those of `module_trace.ModuleGraph`.
        outputs: what `build_unflatten` makes the answer of, as JSON.
        differentiable: whether each tensor of the answer has a gradient.
        in_objects: whether an object in the answer holds it: none of ``tangents`` is its gradient.
        buffers: the inputs that the forward writes, all of them buffers.
        gradients: the input that each output of the backward is the gradient of.
        reach: the positions in ``tangents`` on which each gradient depends.
        made_bytes: memory of what is made for the backward alone.
        rebuilt: those arguments of which something that is made has all that the graphs read, in a
            dtype to which all of the graph casts it at first. In the order of the arguments.
        guards, writes, checks: as those of `trace.ModuleGraph`; nothing but buffers is written.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    inputs: tuple[tuple[bool, int], ...]
    noise: tuple[Noise, ...]
    draws: tuple[Draw, ...]
    examples: tuple[torch.Tensor, ...]
    backward_examples: tuple[torch.Tensor, ...]
    ranges: tuple[Range, ...]
    outputs: str
    differentiable: tuple[bool, ...]
    in_objects: tuple[bool, ...]
    buffers: tuple[int, ...]
    saved: tuple[Saved, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    reach: tuple[tuple[int, ...], ...]
    made_bytes: int
    rebuilt: tuple[Rebuilt, ...]
    guards: tuple[tuple[str, ...], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    checks: bool = False

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.examples[0].device

    def plan(self) -> dict[str, Any]:
        """What the core is told beside the forward's inputs and outputs."""
        made = self.backward_examples[: len(self.saved)]
        tangents = self.backward_examples[len(self.saved) :]
        rows = {
            output: [output, list(t.size()), list(t.stride()), False]
            for output, t in zip(self.tangents, tangents, strict=True)
        }
        have = [output for output, needed in enumerate(self.differentiable) if needed]
        place = {output: position for position, output in enumerate(have)}
        return {
            "buffers": list(self.buffers),
            "differentiable": list(self.differentiable),
            "saved": [
                [saved.kind, saved.index, list(t.size()), list(t.stride())]
                for saved, t in zip(self.saved, made, strict=True)
            ],
            "tangents": [rows.get(output, [output, [], [], True]) for output in have],
            "gradients": list(self.gradients),
            "reach": [[place[self.tangents[number]] for number in row] for row in self.reach],
            "rebuilt": [one.row() for one in self.rebuilt],
            "noise": [noise.row() for noise in self.noise],
            "draws": bool(self.draws),
        }


@dataclass(frozen=True)
class OpenedAnswer:
    """An answer that holds objects which the forward made.

    Attributes:
        answer: of a run.
        structure: how it is built of its leaves.
        in_objects: for each tensor among these whether an object holds it.
    """

    answer: Any
    structure: Structure
    in_objects: list[bool]


@dataclass(frozen=True)
class _Inputs:
    """The placeholders of an exported program that a call gives tensors to."""

    sources: list[tuple[bool, int] | Noise | None]  # None: a constant of the code
    values: list[torch.Tensor]
    positions: list[int]  # among all placeholders
    fixed: list[Any]  # a value for every placeholder

    def arguments(self) -> dict[int, torch.Tensor]:
        """Those of the call, without the module's own, by their place."""
        return {
            index: value
            for index, (source, value) in enumerate(zip(self.sources, self.values, strict=True))
            if isinstance(source, tuple) and not source[0]
        }

    def add_noise(self, noise: Sequence[Noise]) -> None:
        """Inputs of a traced graph that are none of the program's."""
        self.sources.extend(noise)
        self.values.extend(mask.draw() for mask in noise)


def trace_training(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    identity: Identity,
    eager_saves: Collection[int],
    differentiable: Sequence[bool],
    keeps_output: Sequence[bool],
    strides: Sequence[Sequence[int]],
    opened: OpenedAnswer | None = None,
) -> TrainingGraphs:
    """Traces one call with its gradients.

    ``eager_saves`` holds the addresses of the tensors' memory that autograd keeps after the
    module's own forward: only of those the backward reads the memory itself, so that writing to
    another one in between is as harmless as it was. ``keeps_output`` says the same of the answer's
    tensors, ``differentiable`` which of them have gradients, and ``strides`` how the forward lays
    them out, which tracing does not always foresee. ``opened`` is an answer that holds objects.
    Raises CompileRefused.
    """
    traced: torch.nn.Module = module
    if opened is not None:
        traced = OpenedCall(module, args, kwargs, (), opened.structure)
        args, kwargs = tuple(argument_tensors(args, kwargs)), {}
    with torch.enable_grad():
        program, guards = export_strictly(traced, args, kwargs, None, module)
    if opened is not None:
        without_empty_parts(program.graph)
        _drop_metadata_checks(program.graph)
        program.graph_module.recompile()
    inputs = _read_inputs(program, args, kwargs, identity)
    outputs, answers = read_outputs(program.graph, program.call_spec.out_spec)
    if len(answers) != len(differentiable):
        raise CompileRefused("the traced graph returns another number of tensors")
    in_objects = [False] * len(answers)
    if opened is not None:
        outputs = with_objects(outputs, opened.answer, opened.structure, ())
        rows = class_rows(CallObjects(args, kwargs), opened.structure)
        guards = (*guards, *(tuple(row.to_row()) for row in rows))
        in_objects = opened.in_objects
    buffers = [
        index
        for index, source in enumerate(inputs.sources)
        if isinstance(source, tuple) and source[0] and identity.slots[source[1]].kind == "buffer"
    ]
    joint = _trace_joint(
        program, inputs, list(zip(answers, strides, in_objects, strict=True)), buffers
    )
    written = _keep_written(joint, len(answers), buffers)
    draws = drawn_within(joint.graph)
    if not draws:
        inputs.add_noise(take_noise(joint))
    refuse_operators(joint.graph, draws=bool(draws))
    # Both are to be done.
    if use_two_passes(joint.graph) | use_pools_for_gradients(joint.graph):
        joint.recompile()
    reads = read_as(joint.graph, inputs.arguments())
    forward, backward = keep_draws(
        joint, lambda: compat.split_joint_graph(joint, len(answers) + len(written))
    )
    kept = {
        index
        for index, value in enumerate(inputs.values)
        if isinstance(inputs.sources[index], Noise)
        or (value.untyped_storage().data_ptr() in eager_saves and index not in written)
    }
    splitter = _Splitter(forward, backward, inputs, reads)
    splitter.in_objects = tuple(in_objects)
    graphs = splitter.graphs(outputs, written, kept, differentiable, keeps_output, draws)
    return replace(graphs, guards=guards)


def _drop_metadata_checks(graph: torch.fx.Graph) -> None:
    """Of dtype and device, which are each call's; that of a constant cannot be compiled."""
    for node in list(graph.nodes):
        if operator_name(node) == "aten::_assert_tensor_metadata":
            graph.erase_node(node)


def _read_inputs(
    program: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    identity: Identity,
) -> _Inputs:
    found = _Inputs([], [], [], [])
    leaves = iter(user_leaves(program, tuple(args), dict(kwargs)))
    arguments = argument_tensors(args, kwargs)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    constant_bytes = 0
    for position, (node, spec) in enumerate(
        zip(placeholders, program.graph_signature.input_specs, strict=True)
    ):
        kind = spec.kind.name
        value = next(leaves) if kind == "USER_INPUT" else state_value(program, spec.target)
        found.fixed.append(value)
        if not isinstance(value, torch.Tensor):
            if node.users:
                raise CompileRefused("an argument that is no tensor is an input of the graph")
            continue
        source = source_of(value, kind, identity, arguments)
        if source is None:
            constant_bytes += value.numel() * value.element_size()
        found.sources.append(source)
        found.values.append(value)
        found.positions.append(position)
    if constant_bytes > MAX_CONSTANT_BYTES:
        raise CompileRefused("the forward holds large constants")
    return found


def _trace_joint(
    program: torch.export.ExportedProgram,
    inputs: _Inputs,
    answers: Sequence[tuple[int, Sequence[int], bool]],
    buffers: Sequence[int],
) -> torch.fx.GraphModule:
    """One graph: the answer's tensors, every buffer's value afterwards, and all gradients.

    ``answers``: the place of each tensor among what the program returns, its strides, and whether
    an object holds it.
    """
    called = program.graph_module
    other = torch.fx.GraphModule(called, copy.deepcopy(called.graph))
    try:
        if use_channels_last(other.graph):
            other.recompile()
            with contextlib.suppress(Exception):
                joint = _trace_called(other, program, inputs, answers, buffers)
                # Where a mask's numbers lie depends on its layout.
                if drawn_layouts(joint.graph) == drawn_layouts(program.graph):
                    return joint
        return _trace_called(called, program, inputs, answers, buffers)
    except CompileRefused:
        raise
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {first_line(error)}") from error


def _trace_called(
    called: torch.fx.GraphModule,
    program: torch.export.ExportedProgram,
    inputs: _Inputs,
    answers: Sequence[tuple[int, Sequence[int], bool]],
    buffers: Sequence[int],
) -> torch.fx.GraphModule:
    """`_trace_joint` of the program's graph, or of one that stands for it."""

    def forward(*values: torch.Tensor) -> list[torch.Tensor]:
        own = list(values)
        for index in buffers:
            own[index] = own[index].clone()
        everything = list(inputs.fixed)
        for position, value in zip(inputs.positions, own, strict=True):
            everything[position] = value
        given = called(*everything)
        return [
            # A clone: what may show an input is not traced, and a linear layer's answer may.
            *(
                in_strides(given[i].detach() if held else given[i], wanted).clone()
                for i, wanted, held in answers
            ),
            *(own[i].detach() for i in buffers),
        ]

    joint = compat.joint_graph(forward, tuple(inputs.values))
    _drop_clones(joint, len(answers))
    return joint


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
    graph.eliminate_dead_code()
    joint.recompile()
    return written


_Env = dict[torch.fx.Node, torch.fx.Node]


class _Splitter:
    """Makes the two graphs anew of what the partitioner gave."""

    def __init__(
        self,
        forward: torch.fx.GraphModule,
        backward: torch.fx.GraphModule,
        inputs: _Inputs,
        reads: Mapping[int, tuple[torch.dtype, Part | None]],
    ) -> None:
        self._forward, self._backward = forward, backward
        self._inputs, self._reads = inputs, reads
        self._arguments = list(forward.graph.find_nodes(op="placeholder"))
        self._returned = list(_output(forward.graph).args[0])
        if len(self._arguments) != len(inputs.values):
            raise CompileRefused("the traced graph takes another number of tensors")
        # The inputs that calls give, by their place in the graph as it was traced.
        given = [index for index, source in enumerate(inputs.sources) if source is not None]
        self._number = {self._arguments[index]: number for number, index in enumerate(given)}
        self._given = given
        self.in_objects: tuple[bool, ...] = ()

    def graphs(
        self,
        outputs: str,
        written: Sequence[int],
        kept: set[int],
        differentiable: Sequence[bool],
        keeps_output: Sequence[bool],
        draws: Sequence[Draw],
    ) -> TrainingGraphs:
        """The result. ``kept``: the inputs whose memory the backward may read."""
        answers, passed = len(differentiable), self._returned[len(differentiable) + len(written) :]
        tangents = [
            output
            for output, needed in enumerate(differentiable)
            if needed and not self.in_objects[output]
        ]
        into = list(self._backward.graph.find_nodes(op="placeholder"))
        if len(into) != len(passed) + len(tangents) or not all(
            isinstance(node, torch.fx.Node) for node in passed
        ):
            raise CompileRefused("the backward takes another number of tensors")
        # What the backward reads: inputs and nodes of the forward, each once.
        chains = {node: _views_of(node) for node in passed}
        roots = list(dict.fromkeys(_root(node, chains[node]) for node in passed))
        roots = [node for node in roots if node in self._number or not _is_constant(node)]
        made: list[torch.fx.Node] = []
        saved: list[Saved] = []
        allowed = {self._arguments[index] for index in kept}
        for node in roots:
            if node in allowed:
                saved.append(Saved("input", self._number[node]))
            elif node in self._returned[:answers] and keeps_output[self._returned.index(node)]:
                saved.append(Saved("output", self._returned.index(node)))
            else:
                saved.append(Saved("made", len(made)))
                made.append(node)
        forward, ranges = self._make_forward(answers + len(written), made)
        backward, gradients, reach = self._make_backward(roots, passed, chains, len(tangents))
        self._check_indices(backward, roots, ranges)
        examples = tuple(self._inputs.values[index] for index in self._given)
        sources = [self._inputs.sources[index] for index in self._given]
        return TrainingGraphs(
            forward=forward,
            backward=backward,
            inputs=tuple(source for source in sources if isinstance(source, tuple)),
            noise=tuple(source for source in sources if isinstance(source, Noise)),
            draws=tuple(draws),
            examples=examples,
            backward_examples=tuple(
                examples[source.index] if source.kind == "input" else _example(node)
                for source, node in [
                    *zip(saved, roots, strict=True),
                    *((Saved("tangent", 0), node) for node in into[len(passed) :]),
                ]
            ),
            ranges=ranges,
            outputs=outputs,
            differentiable=tuple(differentiable),
            in_objects=self.in_objects,
            buffers=tuple(self._given.index(index) for index in written),
            saved=tuple(saved),
            tangents=tuple(tangents),
            gradients=gradients,
            reach=reach,
            made_bytes=sum(_bytes(node) for node in made),
            rebuilt=self._rebuilt(roots, saved),
        )

    def _rebuilt(
        self, roots: Sequence[torch.fx.Node], saved: Sequence[Saved]
    ) -> tuple[Rebuilt, ...]:
        rows: dict[int, Rebuilt] = {}
        for position, (node, source) in enumerate(zip(roots, saved, strict=True)):
            argument, shown, dtypes = copied(node)
            if source.kind != "made" or argument not in self._number:
                continue
            index = self._arguments.index(argument)
            wanted, part = self._reads.get(index, (None, None))
            if wanted is None or not all(holds(dtype, wanted) for dtype in dtypes):
                continue
            if part == (part_of(shown, argument) if shown is not argument else None):
                own = self._inputs.sources[index]
                assert isinstance(own, tuple)
                of_module, number = own
                assert not of_module
                one = Rebuilt(self._number[argument], position, number, part)
                rows.setdefault(number, one)
        return tuple(rows[number] for number in sorted(rows))

    def _make_forward(
        self, returns: int, made: Sequence[torch.fx.Node]
    ) -> tuple[torch.fx.GraphModule, tuple[Range, ...]]:
        graph = torch.fx.Graph()
        module = torch.nn.Module()
        env: _Env = {}
        for index, node in enumerate(self._arguments):
            env[node] = self._argument(graph, module, node, index)
        _copy_body(self._forward.graph, graph, env)
        results = [env[node] for node in self._returned[:returns]]
        # What the backward needs, and eager's would not have read: its value now.
        for node in made:
            shown = node.op == "placeholder" or node in self._returned[:returns]
            results.append(_clone(graph, env[node]) if shown else env[node])
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        ranges = index_ranges(graph)
        trap_negative_labels(graph)
        return torch.fx.GraphModule(module, graph), ranges

    def _argument(
        self, graph: torch.fx.Graph, module: torch.nn.Module, node: torch.fx.Node, index: int
    ) -> torch.fx.Node:
        """A placeholder, or the constant of the code that stands in its place."""
        if self._inputs.sources[index] is not None:
            made = graph.placeholder(node.name)
        else:
            name = f"_eagercache_constant_{index}"
            module.register_buffer(name, self._inputs.values[index].detach().clone())
            made = graph.get_attr(name)
        made.meta.update(node.meta)
        return made

    def _make_backward(
        self,
        roots: Sequence[torch.fx.Node],
        passed: Sequence[torch.fx.Node],
        chains: Mapping[torch.fx.Node, list[torch.fx.Node]],
        num_tangents: int,
    ) -> tuple[torch.fx.GraphModule, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        graph = torch.fx.Graph()
        module = torch.nn.Module()
        into = list(self._backward.graph.find_nodes(op="placeholder"))
        env: _Env = {}
        here: _Env = {}  # of the forward's nodes
        tangents = into[len(passed) :]
        for node in [*roots, *tangents]:
            placeholder = graph.placeholder(node.name)
            placeholder.meta.update(node.meta)
            (env if node in tangents else here)[node] = placeholder
        for source, node in zip(passed, into[: len(passed)], strict=True):
            root = _root(source, chains[source])
            if root not in here:
                self._make_constant(graph, module, root, here)
            env[node] = here[root]
            for view in reversed(chains[source]):
                env[node] = graph.node_copy(view, lambda _, shown=env[node]: shown)
        _copy_body(self._backward.graph, graph, env)
        wanted = list(_output(self._backward.graph).args[0])
        results: list[torch.fx.Node] = []
        numbers: list[int] = []
        reach: list[tuple[int, ...]] = []
        for index, value in enumerate(wanted):
            if value is None:
                continue
            own = env[value]
            behind = _ancestors(own)
            reach.append(tuple(i for i, node in enumerate(tangents) if env[node] in behind))
            if self._inputs.values[index].is_contiguous() and is_channels_last(own.meta["val"]):
                own = _clone(graph, own, memory_format=torch.contiguous_format)
            elif own in results or own.op != "call_function":
                own = _clone(graph, own)
            results.append(own)
            numbers.append(self._number[self._arguments[index]])
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        return torch.fx.GraphModule(module, graph), tuple(numbers), tuple(reach)

    def _make_constant(
        self, graph: torch.fx.Graph, module: torch.nn.Module, root: torch.fx.Node, here: _Env
    ) -> None:
        """Puts a node of the forward that no call changes into the backward, too."""
        behind = _ancestors(root)
        for node in self._forward.graph.nodes:
            if node not in behind or node in here:
                continue
            if node.op == "placeholder":
                here[node] = self._argument(graph, module, node, self._arguments.index(node))
            else:
                here[node] = graph.node_copy(node, lambda before: here[before])

    def _check_indices(
        self,
        backward: torch.fx.GraphModule,
        roots: Sequence[torch.fx.Node],
        ranges: Sequence[Range],
    ) -> None:
        """Raises CompileRefused where the backward indexes with what was not checked before."""
        checked = {position for position, *_ in ranges}
        unchecked = {
            placeholder
            for placeholder, root in zip(
                backward.graph.find_nodes(op="placeholder"), roots, strict=False
            )
            if root in self._number
            and self._number[root] not in checked
            and not root.meta["val"].is_floating_point()
        }
        for node in backward.graph.nodes:
            if operator_name(node) in _INDEXING_BACKWARD and _ancestors(node) & unchecked:
                raise CompileRefused(f"the backward indexes with data ({node.target})")


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a constant of the code, or made of nothing that a call gives."""
    return node.op == "placeholder" or is_made_here(node)


def _output(graph: torch.fx.Graph) -> torch.fx.Node:
    (node,) = graph.find_nodes(op="output")
    return node


def _copy_body(source: torch.fx.Graph, target: torch.fx.Graph, env: _Env) -> None:
    for node in source.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = target.node_copy(node, lambda before: env[before])


def _clone(graph: torch.fx.Graph, node: torch.fx.Node, **options: Any) -> torch.fx.Node:
    clone = graph.call_function(_aten.clone.default, (node,), options)
    clone.meta["val"] = node.meta["val"].clone(**options)
    return clone


def _views_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The views, last one first, through which ``node`` shows what is to be saved.

    That is an input, or a tensor that is shown whole: other views of it are saved at no cost. A
    copy of an input, in another layout for one, is made again.
    """
    if operator_name(node) == "aten::clone" and node.args[0].op == "placeholder":
        return [node]
    for views in (VIEWS, WHOLE_VIEWS):
        chain = []
        root = node
        while operator_name(root) in views and isinstance(root.args[0], torch.fx.Node):
            chain.append(root)
            root = root.args[0]
        if root.op == "placeholder":
            break
    return chain


def _root(node: torch.fx.Node, views: Sequence[torch.fx.Node]) -> torch.fx.Node:
    root = views[-1].args[0] if views else node
    assert isinstance(root, torch.fx.Node)
    return root


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(current.all_input_nodes)
    return seen


def _example(node: torch.fx.Node) -> torch.Tensor:
    """A tensor of the node's metadata."""
    value = node.meta["val"]
    made = torch.empty_strided(
        tuple(value.size()), tuple(value.stride()), dtype=value.dtype, device=value.device
    )
    return made.zero_()


def _bytes(node: torch.fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())
