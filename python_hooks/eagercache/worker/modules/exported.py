"""A call as `torch.export` gives it: its program, its guards, its leaves and its outputs."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.outputs import spec_text
from eagercache.calls.texts import named_line
from eagercache.worker.compat import process_values, traced_graphs
from eagercache.worker.compat.checkpoints import inline_checkpoints
from eagercache.worker.compat.copies import is_copy, teach_copies
from eagercache.worker.compat.encoder_layers import trace_attention_as_called
from eagercache.worker.compat.python_calls import teach_python_calls
from eagercache.worker.graphs.bags import sum_equal_bags
from eagercache.worker.graphs.one_hots import look_up_one_hots
from eagercache.worker.graphs.read_numbers import numbers_as_tensors
from eagercache.worker.graphs.recurrent import check_recurrent
from eagercache.worker.graphs.same_programs import compute_the_same
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.guards import DynamoGuards
from eagercache.worker.modules.opened import OpenedCall

# Dynamo's words before the list of what is changed, and how it names a global variable there.
_SIDE_EFFECTS = "certain side effects happened"
_LISTED = "double check: "
_GLOBAL = re.compile(r"^G\['(?:__import_)?(.*?)'\]")


def export_strictly(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any = None,
    guarded: torch.nn.Module | None = None,
) -> tuple[torch.export.ExportedProgram, tuple[tuple[str, ...], ...]]:
    """The call as TorchDynamo traces it, and what its guards say (`GuardRow.to_row`).

    ``guarded``: the module that is guarded, where ``module`` is an `OpenedCall` of it.

    Raises CompileRefused where it cannot, and for a forward with side effects. Dynamo knows which
    objects that existed before the call would be changed by it, and says so in a warning
    (`OutputGraph.codegen_suffix`): an exported program leaves that out. What is changed of the
    module itself is seen otherwise (`compile._observe`).
    """
    guarded = module if guarded is None else guarded
    program, rows, own = _export(module, args, kwargs, shapes, guarded, 0)
    if own.reasons:
        raise CompileRefused(own.reasons[0])
    for order in range(1, own.orders):
        other, other_rows, seen = _export(module, args, kwargs, shapes, guarded, order)
        alike = not seen.reasons and (seen.place, seen.orders) == (own.place, own.orders)
        same = alike and sorted(rows) == sorted(other_rows)
        if not same or not compute_the_same(program, other):
            raise CompileRefused(f"{own.place} {process_values.SET_ORDER}")
    if own.mode:
        with _recording_gradients(module, args, kwargs):
            other, other_rows, seen = _export(module, args, kwargs, shapes, guarded, 0)
        same = not seen.reasons and sorted(rows) == sorted(other_rows)
        if not same or not compute_the_same(program, other):
            raise CompileRefused(f"{own.mode} asks whether gradients are recorded")
    return program, rows


@contextlib.contextmanager
def _recording_gradients(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """A block in which gradients are recorded, and none are needed: as where weights are frozen."""
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    needing = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    try:
        for tensor in needing:
            tensor.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for tensor in needing:
            tensor.requires_grad_(True)


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
    guarded: torch.nn.Module,
    order: int,
) -> tuple[torch.export.ExportedProgram, tuple[tuple[str, ...], ...], process_values.ProcessValues]:
    """`export_strictly`, with a set that the forward goes through in one of its orders."""
    guards = DynamoGuards(opened=None if guarded is module else module)
    traced_graphs.export_constants_of_objects()
    traced_graphs.mend_final_states()
    trace_attention_as_called()
    inline_checkpoints()
    teach_copies()
    teach_python_calls()
    try:
        with (
            warnings.catch_warnings(record=True) as said,
            guards.recorded(),
            traced_graphs.takes_recurrent_layers(),
            traced_graphs.data_as_detached(),
            process_values.noticed(order, _arrays_of(guarded)) as own,
        ):
            warnings.simplefilter("always")
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=True)
        changed = [
            name
            for name in _changed_objects([str(warning.message) for warning in said])
            if name not in guards.restored
        ]
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {named_line(error)}") from error
    for owner, name in guards.assigned if shapes is not None else ():
        if not (isinstance(module, OpenedCall) and module.returns_attribute(owner, name)):
            raise CompileRefused(f"it assigns a size that is open to its attribute {name}")
    check_recurrent(program.graph)
    look_up_one_hots(program.graph_module)
    numbers_as_tensors(program.graph_module)
    # On a CPU native's kernel of bags is faster than generated code, with its gradient, too.
    if _on_a_gpu(program.graph) and sum_equal_bags(program.graph):
        program.graph_module.recompile()
    if changed:
        name = _GLOBAL.sub(r"\1", changed[0]).replace("_dot_", ".")
        raise CompileRefused(f"the forward changes {name}, which outlives the call")
    return program, tuple(tuple(row.to_row()) for row in guards.rows(guarded)), own


def _arrays_of(module: torch.nn.Module) -> list[int]:
    """The ids of the arrays that `identify` takes, which are watched in the program."""
    try:
        return [id(array) for array in identify(module).arrays]
    except Unfit:  # one that is exported, and not watched, need not be described
        return []


def _on_a_gpu(graph: torch.fx.Graph) -> bool:
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


def _changed_objects(warned: Sequence[str]) -> list[str]:
    """What Dynamo says that the forward would change, but for the module itself."""
    return [
        name
        for text in warned
        if _SIDE_EFFECTS in text
        for name in ast.literal_eval(text.partition(_LISTED)[2])
        if not name.startswith("L['self']") and not is_copy(name)
    ]


def user_leaves(
    program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Leaves of the call in the order of the program's user inputs."""
    spec = program.call_spec.in_spec
    assert spec is not None
    names = (
        list(spec.children()[1].context)
        if hasattr(spec, "children")
        else list(spec.children_specs[1].context)
    )
    return pytree.tree_leaves((args, {name: kwargs[name] for name in names}))


def state_value(program: torch.export.ExportedProgram, target: str) -> Any:
    """The parameter, buffer or constant of that name."""
    state = program.state_dict
    return state[target] if target in state else program.constants[target]


def source_of(
    value: torch.Tensor, kind: str, identity: Identity, arguments: Sequence[torch.Tensor]
) -> tuple[bool, int] | None:
    """Where a call finds the tensor; None for a constant of the code."""
    if kind == "USER_INPUT":
        for index, argument in enumerate(arguments):
            if argument is value:
                return False, index
        raise CompileRefused("an argument was replaced while tracing")
    for index, slot in enumerate(identity.slots):
        if slot.tensor is value or (
            slot.tensor.data_ptr() == value.data_ptr()
            and slot.tensor.size() == value.size()
            and slot.tensor.stride() == value.stride()
            and slot.tensor.dtype == value.dtype
        ):
            return True, index
    return None


def read_outputs(
    graph: torch.fx.Graph, spec: pytree.TreeSpec, *, detaches: bool = False
) -> tuple[str, list[int]]:
    """How a forward's answer is built of its tensors, as JSON, and which outputs are tensors.

    With ``detaches`` one that another is but for `detach` is made of that, and is none of them.
    Raises CompileRefused for what no kernel can return.
    """
    (output,) = [node for node in graph.nodes if node.op == "output"]
    tensors: list[int] = []
    met: set[torch.fx.Node] = set()
    bases: dict[torch.fx.Node, int] = {}
    leaves: list[Any] = []
    for position, value in enumerate(output.args[0]):
        if isinstance(value, torch.fx.Node):
            if not isinstance(value.meta.get("val"), torch.Tensor):
                raise CompileRefused("the forward returns a number that it computes")
            if value.op != "call_function":
                raise CompileRefused("the forward returns one of its inputs")
            if value in met:
                raise CompileRefused("the forward returns a tensor twice")
            met.add(value)
            base = _attached(value) if detaches else value
            if base in bases:
                leaves.append({"detached": bases[base]})
                continue
            bases[base] = len(tensors)
            leaves.append({"tensor": len(tensors)})
            tensors.append(position)
        elif value is None or type(value) in (bool, int, float, str):
            leaves.append({"value": value})
        else:
            raise CompileRefused(f"the forward returns a {type(value).__name__}")
    if not tensors:
        raise CompileRefused("the forward returns no tensor")
    try:
        text = spec_text(spec)
    except Exception as error:
        raise CompileRefused(
            f"what the forward returns cannot be stored: {named_line(error)}"
        ) from error
    return json.dumps({"spec": text, "leaves": leaves}), tensors


def _attached(node: torch.fx.Node) -> torch.fx.Node:
    """What a node detaches, or the node."""
    while node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.args[0]
    return node


def flatten_outputs(graph: torch.fx.Graph, program: torch.export.ExportedProgram) -> str:
    """Leaves only tensors in the output node; returns how the answer is built of them."""
    outputs, tensors = read_outputs(graph, program.call_spec.out_spec, detaches=True)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = (tuple(output.args[0][position] for position in tensors),)
    return outputs
