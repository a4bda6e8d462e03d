"""A module's call turned into one graph whose inputs are its tensors and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from eagercache.callables.answer_structure import (
    Structure,
    holds_objects,
    refuse_lasting,
    structure_of,
)
from eagercache.callables.arguments import argument_tensors, sized_values, stand_in
from eagercache.callables.module_identity import Identity, Unfit
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.objects import CallObjects, Change
from eagercache.calls.texts import named_line
from eagercache.worker.compat import traced_graphs
from eagercache.worker.graphs.constants import (
    constants_as_inputs,
    inputs_as_constants,
    make_constant,
)
from eagercache.worker.graphs.custom_calls import CustomCalls, take_custom_calls
from eagercache.worker.graphs.dropout_masks import (
    Noise,
    noise_as_drawn,
    number_layouts,
    ranges_of_given,
)
from eagercache.worker.graphs.indices import (
    Range,
    check_inside,
    checks_beside_writes,
    index_ranges,
    refuse_data_checks,
    trap_negative_indices,
)
from eagercache.worker.graphs.labels import picks_by_labels
from eagercache.worker.graphs.refused_operators import refuse_operators
from eagercache.worker.graphs.writes import (
    holds_blocks_of_autocast,
    is_write,
    return_writes,
    without_writes,
    write_at_the_end,
    write_returned,
)
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.class_rows import class_rows
from eagercache.worker.modules.exported import (
    export_strictly,
    flatten_outputs,
    source_of,
    state_value,
    user_leaves,
)
from eagercache.worker.modules.opened import (
    Kept,
    OpenedCall,
    check_constructors,
    drop_kept,
    kept_values,
    with_objects,
    without_empty_parts,
)
from eagercache.worker.modules.symbolic import SymbolicSizes, dynamic_shapes, symbolic_sizes

MAX_CONSTANT_BYTES = 1 << 20

_aten = torch.ops.aten


@dataclass(frozen=True)
class ModuleGraph:
    """A traced call.

    Attributes:
        graph: its placeholders are tensors only, its outputs too.
        inputs: for each placeholder (True, slot of the identity) or (False, argument tensor).
        examples: the tensors for the placeholders.
        ranges: (placeholder, low, high, also): other values than ``also`` outside of it must not
            reach the kernel.
        outputs: what `module_outputs.build_unflatten` makes the answer of, as JSON.
        symbolic: what is not known of the sizes; None where all are. ``examples`` are fake then.
        guards: what the trace stands on beside them, as `GuardRow.to_row`.
        writes: (whether it is a slot of the identity, its index or that of the argument tensor, how
            often) of those that the graph writes into.
        checks: whether its last output, which is not of the answer, says if all indices were
            inside (`indices.check_inside`).
        calls: of custom operators, which the graph calls; `CustomCalls.close` is the taker's.
        noise: the graph's further inputs, with examples too: what a call draws before it.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[tuple[bool, int], ...]
    examples: tuple[torch.Tensor, ...]
    ranges: tuple[Range, ...]
    outputs: str
    symbolic: SymbolicSizes | None = None
    guards: tuple[tuple[str, ...], ...] = ()
    writes: tuple[tuple[bool, int, int], ...] = ()
    checks: bool = False
    calls: CustomCalls | None = None
    noise: tuple[Noise, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.examples[0].device if self.examples else torch.device("cpu")


def trace_module(
    rebuilt: Transferred,
    identity: Identity,
    open_sizes: Sequence[tuple[int, int]] = (),
    operators: Sequence[str] | None = None,
) -> ModuleGraph:
    """Traces one call. Raises CompileRefused when it is no pure function of its tensors.

    Under autocast its casts are in the graph. ``operators`` are the custom ones that the forward
    calls, in order; None refuses them.

    ``open_sizes`` are the (place in `sized_values`, dimension) pairs whose sizes, at least 2, are
    to be left open: what is assumed of them is in the graph's ``symbolic``.
    """
    module: torch.nn.Module = rebuilt.module
    args, kwargs = rebuilt.args, rebuilt.kwargs
    opens = _Open(sized_values(args, kwargs), open_sizes)
    arguments = opens.tensors
    objects = rebuilt.objects
    answer, changes = rebuilt.run_once()
    opened = objects.may_change or holds_objects(answer)
    structure: Structure = []
    kept: list[Kept] | None = None
    if opened:
        check_constructors(objects.found)
        structure = _structure_of_new(answer, rebuilt, changes)
        kept = kept_values(objects, changes) if open_sizes else None
        module = OpenedCall(module, args, kwargs, changes, structure, opens.counts, kept)
        args, kwargs = tuple(arguments), {}
    casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    program, guards = _export(module, args, kwargs, opens, rebuilt, casts)
    _refuse_effects(program, casts, custom=operators is not None, draws=rebuilt.draws)
    graph = program.graph_module.graph
    without_empty_parts(graph)
    read = _read_inputs(program, list(user_leaves(program, args, kwargs)), identity, arguments)
    inputs = [
        (own, index if own else opens.input_of(index)) for own, index in read.sources.values()
    ]
    examples = [*(read.fakes if open_sizes else read.values).values()]
    fakes = read.fakes_of_arguments
    symbolic = symbolic_sizes(fakes, opens.traced) if open_sizes else None
    write_at_the_end(program, read.sources, rebuilt.writes)
    if kept:
        sizes = {count: fakes[number].size(0) for number, count in opens.numbers if number in fakes}
        drop_kept(graph, kept, sizes)
    outputs = flatten_outputs(graph, program)
    if symbolic is not None:
        _name_sizes(symbolic, opens, objects)
    if opened:
        outputs = with_objects(outputs, answer, structure, changes, objects.stores)
        guards = (*guards, *(tuple(row.to_row()) for row in class_rows(objects, structure)))
    graph.lint()
    program.graph_module.recompile()
    plain = torch.fx.GraphModule(program.graph_module, graph)
    noise: Sequence[Noise] = ()
    by_labels = not rebuilt.writes and picks_by_labels(graph)
    if casts or rebuilt.draws or by_labels:
        plain, noise = _as_it_runs(plain, examples, casts, draws=rebuilt.draws)
    ranges, checks = _look_at_indices(plain, rebuilt, examples)
    ranges = ranges_of_given(ranges, len(inputs), noise)
    examples.extend(one.draw() for one in noise)
    if symbolic is not None:
        symbolic.see_outputs(plain.graph)
    calls = take_custom_calls(plain.graph, operators, _why_no_operators(rebuilt, casts, symbolic))
    plain.recompile()
    writes = tuple((write.of_module, write.index, write.times) for write in rebuilt.writes)
    found = (ranges, outputs, symbolic, guards, writes, checks, calls, tuple(noise))
    return ModuleGraph(plain, tuple(inputs), tuple(examples), *found)


def _look_at_indices(
    plain: torch.fx.GraphModule, rebuilt: Transferred, examples: Sequence[torch.Tensor]
) -> tuple[tuple[Range, ...], bool]:
    """(bounds of inputs that are indices, whether the kernel checks computed ones itself)."""
    # Where a kernel writes, it would have done so before anybody knew.
    on_cpu = all(example.device.type == "cpu" for example in examples)
    checks = on_cpu and not rebuilt.writes and check_inside(plain.graph)
    if checks:
        plain.recompile()
    ranges = index_ranges(plain.graph)
    trap_negative_indices(plain.graph)
    plain.recompile()
    return ranges, checks


def _why_no_operators(rebuilt: Transferred, casts: bool, symbolic: SymbolicSizes | None) -> str:
    """Why custom operators cannot be called in a kernel of such a call; "" where they can."""
    if casts:
        return "under autocast"
    if symbolic is not None:
        return "with open sizes, of which only the operator knows what follows"
    return "and writes into buffers or tensors of its arguments" if rebuilt.writes else ""


@dataclass
class _Inputs:
    """The tensors that a traced graph is given, by the names of their nodes, in order."""

    sources: dict[str, tuple[bool, int]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    fakes: dict[str, torch.Tensor] = field(default_factory=dict)
    fakes_of_arguments: dict[int, torch.Tensor] = field(default_factory=dict)


def _read_inputs(
    program: torch.export.ExportedProgram,
    leaves: Sequence[Any],
    identity: Identity,
    arguments: Sequence[torch.Tensor],
) -> _Inputs:
    """What the graph's placeholders are. Those of no tensor go, small constants are put inside."""
    graph_module, graph = program.graph_module, program.graph_module.graph
    read = _Inputs()
    constant_bytes = 0
    given = iter(leaves)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        kind = spec.kind.name
        value = next(given) if kind == "USER_INPUT" else state_value(program, spec.target)
        if not isinstance(value, torch.Tensor):
            if node.users:
                raise CompileRefused("an argument that is no tensor is an input of the graph")
            graph.erase_node(node)
            continue
        source = source_of(value, kind, identity, arguments)
        if source is None:
            constant_bytes += value.numel() * value.element_size()
            make_constant(graph_module, node, value)
            continue
        read.sources[node.name] = source
        read.values[node.name], read.fakes[node.name] = value, node.meta["val"]
        if kind == "USER_INPUT":
            read.fakes_of_arguments[source[1]] = node.meta["val"]
    if constant_bytes > MAX_CONSTANT_BYTES:
        raise CompileRefused("the forward holds large constants")
    return read


class _Open:
    """What of a call is left open, and where the trace has it: counts stand behind the tensors.

    Attributes:
        tensors: those of the call, and those that stand for its open counts.
        counts: the numbers of these among the call's counts.
        traced: (number among ``tensors``, dimension) of all that is open.
    """

    def __init__(
        self, sized: Sequence[torch.Tensor | int], open_sizes: Sequence[tuple[int, int]]
    ) -> None:
        self.tensors = [value for value in sized if isinstance(value, torch.Tensor)]
        self._of_call = len(self.tensors)
        self._open = [tuple(place) for place in open_sizes]
        self.counts: list[int] = []
        self.traced: list[tuple[int, int]] = []
        for place, dimension in open_sizes:
            value = sized[place]
            before = [isinstance(other, torch.Tensor) for other in sized[:place]]
            if isinstance(value, torch.Tensor):
                self.traced.append((sum(before), dimension))
            else:
                self.counts.append(len(before) - sum(before))
                self.traced.append((len(self.tensors), 0))
                self.tensors.append(stand_in(value, self.tensors[0]))

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """(number among ``tensors``, number among the call's counts) of each open count."""
        return [(self._of_call + at, count) for at, count in enumerate(self.counts)]

    def input_of(self, number: int) -> int:
        """What the core calls a tensor of the trace: a count is behind all of a call's tensors."""
        of_call = self._of_call
        return number if number < of_call else of_call + self.counts[number - of_call]

    def place_of(self, traced: tuple[int, int]) -> tuple[int, int]:
        """The one of ``open_sizes`` that a place of the trace is."""
        place, dimension = self._open[self.traced.index(traced)]
        return place, dimension


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opens: _Open,
    rebuilt: Transferred,
    casts: bool,
) -> tuple[torch.export.ExportedProgram, tuple[tuple[str, ...], ...]]:
    """The program, without writes and blocks of autocast where these matter, and its guards."""
    if rebuilt.draws and opens.traced:
        raise CompileRefused("the forward draws random numbers, of sizes that are open")
    try:
        shapes = dynamic_shapes(module, args, kwargs, opens.tensors, opens.traced)
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {named_line(error)}") from error
    with torch.no_grad():
        program, guards = export_strictly(module, args, kwargs, shapes, rebuilt.module)
    hidden = holds_blocks_of_autocast(program.graph) or checks_beside_writes(program.graph)
    if rebuilt.writes or (not casts and hidden):
        program = without_writes(program)
    return program, guards


def _name_sizes(symbolic: SymbolicSizes, opens: _Open, objects: CallObjects) -> None:
    """Ties what objects hold to each other, and names open sizes as the call has them."""
    if objects.found:
        held = {id(tensor) for tensor in argument_tensors(objects.found, {})}
        members = [index for index, tensor in enumerate(opens.tensors) if id(tensor) in held]
        symbolic.tie(dict(enumerate(opens.tensors)), members)
    symbolic.open_sizes = tuple(map(opens.place_of, symbolic.open_sizes))


def _structure_of_new(answer: Any, rebuilt: Transferred, changes: Sequence[Change]) -> Structure:
    """Raises CompileRefused for an answer with an object that the call did not make."""
    another, _ = rebuilt.run_once()
    try:
        refuse_lasting(answer, another, rebuilt.objects.found)
        return structure_of(answer, rebuilt.objects, changes)
    except Unfit as error:
        raise CompileRefused(str(error)) from error


def _as_it_runs(
    plain: torch.fx.GraphModule, examples: Sequence[torch.Tensor], casts: bool, *, draws: bool
) -> tuple[torch.fx.GraphModule, list[Noise]]:
    """The graph as it runs below autocast, and what a call draws for it, its last inputs.

    Raises CompileRefused.
    """
    layouts = number_layouts(plain.graph)
    places = return_writes(plain.graph)  # no graph that is decomposed writes its inputs
    made = _decomposed(plain, tuple(examples), casts)
    noise = noise_as_drawn(made, layouts, {example.device.type for example in examples})
    refuse_operators(made.graph)
    write_returned(made.graph, places)
    if draws and not noise:
        raise CompileRefused("it draws random numbers that its graph does not show")
    return made, noise


def _decomposed(
    module: torch.fx.GraphModule, examples: tuple[torch.Tensor, ...], casts: bool
) -> torch.fx.GraphModule:
    """``module``, whose operators are above autocast, as what runs below it."""
    lifted, constants = constants_as_inputs(module)
    given = (*examples, *constants)
    try:
        made = traced_graphs.joint_graph(lambda *x: list(lifted(*x)), given, gradients=False)
    except Exception as error:
        where = " under autocast" if casts else ""
        raise CompileRefused(f"it cannot be traced{where}: {named_line(error)}") from error
    inputs_as_constants(made, constants)
    return made


def _refuse_effects(
    program: torch.export.ExportedProgram, casts: bool, *, custom: bool, draws: bool
) -> None:
    for spec in program.graph_signature.output_specs:
        kind = spec.kind.name
        if kind != "USER_OUTPUT" and not is_write(spec):
            target = f" {spec.target}" if spec.target else ""
            raise CompileRefused(f"the forward writes to its state or arguments{target}")
    refuse_data_checks(program.graph_module)
    if not casts:  # else they are looked at where there are no blocks of autocast any more
        refuse_operators(program.graph, custom=custom, draws=draws)
