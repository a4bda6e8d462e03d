"""A call whose arguments have objects, traced as a function of tensors alone.

The objects are built anew inside of the trace, of the tensors that they hold and of what else the
key of the call says of them. TorchDynamo then follows what the forward does to them as to any
objects that it makes itself, and what they hold in the end is part of what the graph returns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagercache.callables.guard_rows import GuardRow, Path, describe, resolve
from eagercache.callables.objects import (
    CallObjects,
    Change,
    is_object,
    leaves_of,
    structure_of,
)
from eagercache.callables.outputs import stored_leaf
from eagercache.worker.inductor.commands import CompileRefused

# The name of the traced module in `OpenedCall`, which guards' paths leave out.
INNER = "eagercache_opened"


class OpenedCall(torch.nn.Module):
    """Calls a module with objects that it builds of tensors; `forward` is what is traced.

    It returns the leaves of the answer, and then what the forward put into the objects: see
    `changes`, as a run of the forward left them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        changes: Sequence[Change],
    ) -> None:
        super().__init__()
        self.add_module(INNER, module)
        tensors: list[torch.Tensor] = []
        self.template = _template((tuple(args), dict(kwargs)), tensors)
        self.tensors_of_call = len(tensors)
        self.places = tuple(
            (change.index, change.place) for change in changes if not _is_of_torch(change.value)
        )

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        """The call, with the tensors of its arguments in the core's order."""
        objects: list[Any] = []
        args, kwargs = _build(self.template, tensors, objects)
        answer = self.eagercache_opened(*args, **kwargs)
        leaves: list[Any] = []
        leaves_of(answer, objects, leaves)
        for index, place in self.places:
            held = getattr(objects[index], place[0])
            for key in place[1:]:
                held = held[key]
            leaves.append(held)
        return leaves


def _template(value: Any, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return (kind, tuple(_template(item, tensors) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple((key, _template(item, tensors)) for key, item in value.items()))
    if is_object(value):
        held = tuple((name, _template(item, tensors)) for name, item in vars(value).items())
        return ("object", held, type(value))
    return ("value", value)


def _build(template: tuple[Any, ...], tensors: Sequence[torch.Tensor], objects: list[Any]) -> Any:
    kind, held = template[0], template[1]
    if kind == "tensor":
        return tensors[held]
    if kind == "tuple":
        return tuple([_build(item, tensors, objects) for item in held])
    if kind == "list":
        return [_build(item, tensors, objects) for item in held]
    if kind == "dict":
        return {key: _build(item, tensors, objects) for key, item in held}
    if kind == "object":
        made = object.__new__(template[2])
        objects.append(made)
        for name, item in held:
            setattr(made, name, _build(item, tensors, objects))
        return made
    return held


def without_empty_parts(graph: torch.fx.Graph) -> None:
    """Leaves out of a `cat` what has no elements and one dimension, as a cache is made of.

    Where one part is left Inductor would hand that on with its own strides; eager's are those of a
    new tensor.
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target != aten.cat.default:
            continue
        parts = [part for part in node.args[0] if tuple(part.meta["val"].shape) != (0,)]
        if not parts or len(parts) == len(node.args[0]):
            continue
        with graph.inserting_before(node):
            if len(parts) == 1:
                given = {"memory_format": torch.contiguous_format}
                made = graph.call_function(aten.clone.default, (parts[0],), given)
            else:
                made = graph.call_function(aten.cat.default, (parts, *node.args[1:]), node.kwargs)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _is_of_torch(value: Any) -> bool:
    """Whether no graph returns such a value; it follows from the key of the call."""
    return isinstance(value, (torch.dtype, torch.device))


def with_objects(outputs: str, answer: Any, objects: CallObjects, changes: Sequence[Change]) -> str:
    """The text of `read_outputs` for what `OpenedCall` returns, as `build_unflatten` reads it.

    ``answer`` and ``changes`` are those of a run. Raises CompileRefused where the trace differs.
    """
    structure = structure_of(answer, objects.found)
    met: list[Any] = []
    leaves_of(answer, objects.found, met)
    traced = json.loads(outputs)["leaves"]
    leaves, rest = traced[: len(met)], iter(traced[len(met) :])
    values = [*met]
    for change in changes:
        leaves.append(stored_leaf(change.value) if _is_of_torch(change.value) else next(rest))
        values.append(change.value)
    for leaf, value in zip(leaves, values, strict=True):
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor != ("tensor" in leaf) or not (is_tensor or stored_leaf(value) == leaf):
            raise CompileRefused("what it puts into an argument is another thing in a trace")
    return json.dumps(
        {
            "answer": structure,
            "changes": [[change.index, list(change.place)] for change in changes],
            "leaves": leaves,
        }
    )


def class_rows(objects: CallObjects) -> list[GuardRow]:
    """What the classes of the objects are, which a program may change. Raises CompileRefused."""
    rows = []
    nobody = torch.nn.Module()
    for kind in dict.fromkeys(map(type, objects.found)):
        names = kind.__qualname__.split(".")
        path: Path = (("import", kind.__module__), *(("attr", name) for name in names))
        # A worker's `__main__` is another one.
        if kind.__module__ != "__main__" and resolve(path, nobody) is not kind:
            raise CompileRefused(f"the class {kind.__qualname__} cannot be found by its name")
        rows.append(GuardRow(path, "value", None, describe(kind, "value", None, nobody)))
    return rows
