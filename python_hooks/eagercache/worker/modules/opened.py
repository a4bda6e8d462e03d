"""A call whose arguments have objects, traced as a function of tensors alone.

The objects are built anew inside of the trace, of the tensors that they hold and of what else the
key of the call says of them. TorchDynamo then follows what the forward does to them as to any
objects that it makes itself, and what they hold in the end is part of what the graph returns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.answer_structure import (
    CONSTANTS,
    Structure,
    stored_constant,
    take,
)
from eagercache.callables.arguments import stand_in
from eagercache.callables.made_classes import fields_of, is_fixed
from eagercache.callables.module_stores import ModuleStores
from eagercache.callables.objects import CallObjects, Change, Place, is_count, is_object
from eagercache.callables.outputs import COUNT_OFFSET
from eagercache.worker.inductor.commands import CompileRefused

# The name of the traced module in `OpenedCall`, which guards' paths leave out.
INNER = "eagercache_opened"


@dataclass(frozen=True)
class Kept:
    """A plain value in an object, which a run of the forward left as it was.

    Attributes:
        index: of the object among those of the call.
        place: where in it.
        value: the value.
        count: its number among the call's counts; None where it is none.
        constant: the value where no graph returns it; ``value`` is True then.
    """

    index: int
    place: Place
    value: Any
    count: int | None
    constant: Any = None


def kept_values(objects: CallObjects, changes: Sequence[Change]) -> list[Kept]:
    """The plain values of a call's objects but for those that are among ``changes``."""
    changed = {(change.index, change.place) for change in changes}
    numbers = itertools.count()
    indices = {id(owner): index for index, owner in enumerate(objects.found)}
    walked: set[int] = set()
    found: list[Kept] = []

    def walk(value: Any, index: int, place: Place) -> None:
        if is_object(value):
            walked.add(id(value))
            index, place = indices[id(value)], ()
            held: Any = fields_of(value)
        else:
            held = value
        for key, part in held.items() if isinstance(held, dict) else enumerate(held):
            where = (*place, key)
            if isinstance(part, (tuple, list, dict)) or is_object(part):
                walk(part, index, where)
            elif part is None or type(part) in (bool, int, float, str):
                number = next(numbers) if is_count(part) else None
                if (index, where) not in changed:
                    found.append(Kept(index, where, part, number))
            elif isinstance(part, CONSTANTS) and (index, where) not in changed:
                found.append(Kept(index, where, True, None, part))

    for owner in objects.found:  # one that another holds comes behind it
        if id(owner) not in walked:
            walk(owner, 0, ())
    return found


def drop_kept(
    graph: torch.fx.Graph, kept: Sequence[Kept], sizes: Mapping[int, torch.SymInt | int]
) -> None:
    """Takes the values of `kept_values` out of what the graph returns.

    Raises CompileRefused unless each is, for all sizes, what it was: a forward may change it for
    others than those of the run. ``sizes`` are the graph's of the counts that are open.
    """
    (output,) = graph.find_nodes(op="output")
    values = output.args[0]
    for one, value in zip(kept, values[len(values) - len(kept) :], strict=True):
        now = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        if isinstance(now, torch.SymInt):
            size = sizes.get(one.count) if one.count is not None else None
            same = isinstance(size, torch.SymInt) and now.node.expr == size.node.expr - COUNT_OFFSET
        else:
            same = type(now) is type(one.value) and repr(now) == repr(one.value)
        if not same:
            raise CompileRefused(f"it changes {one.place[-1]!r} of an argument for some sizes")
    output.args = (tuple(values[: len(values) - len(kept)]),)


class OpenedCall(torch.nn.Module):
    """Calls a module with objects that it builds of tensors; `forward` is what is traced.

    It returns the leaves of the answer, and then what the forward put into the objects and assigned
    to attributes: see `changes`, as a run of the forward left them. ``open_counts`` are those of
    the objects' counts, by number, that are no constants of the trace: it takes tensors that stand
    for them behind the call's own, and returns such for the counts that the forward put into
    objects. With ``kept``, where sizes or counts are open, it returns the values in these places
    last: see `drop_kept`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        changes: Sequence[Change],
        structure: Structure,
        open_counts: Sequence[int] = (),
        kept: Sequence[Kept] | None = None,
    ) -> None:
        super().__init__()
        self.structure = structure
        self.add_module(INNER, module)
        paths = [path.split(".") if path else [] for path, _ in module.named_modules()]
        templates = _Templates(open_counts)
        self.template = templates.of((tuple(args), dict(kwargs)), inside=False)
        self.tensors_of_call = templates.tensors
        self.places = tuple(
            (
                paths[change.index] if change.of_module else change.index,
                change.place,
                kept is not None and is_count(change.value),
                None,
            )
            for change in changes
            if not isinstance(change.value, CONSTANTS)
        )
        self.places += tuple((one.index, one.place, False, one.constant) for one in kept or ())

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        """The call, with the tensors of its arguments in the core's order."""
        objects: list[Any] = []
        counts = [tensor.size(0) - COUNT_OFFSET for tensor in tensors[self.tensors_of_call :]]
        args, kwargs = _build(self.template, tensors, counts, objects)
        answer = self.eagercache_opened(*args, **kwargs)
        leaves: list[Any] = []
        take(self.structure, answer, leaves)
        for where, place, counts_on, constant in self.places:
            owner = objects[where] if isinstance(where, int) else self._module_at(where)
            held = getattr(owner, place[0])
            for key in place[1:]:
                held = held[key]
            if constant is not None:
                held = type(held) is type(constant) and held == constant
            leaves.append(stand_in(held, tensors[0]) if counts_on else held)
        return leaves

    def returns_attribute(self, module: torch.nn.Module, name: str) -> bool:
        """Whether what is assigned to an attribute of ``module`` is among what it returns."""
        return any(
            place == (name,) and self._module_at(where) is module
            for where, place, *_ in self.places
            if not isinstance(where, int)
        )

    def _module_at(self, path: Sequence[str]) -> Any:
        found = self.eagercache_opened
        for name in path:
            found = found._modules[name]
        return found


class _Templates:
    """How arguments are built of tensors, in the core's order, and of counts that are open."""

    def __init__(self, open_counts: Sequence[int]) -> None:
        self.tensors = 0
        self._counts = 0
        self._open = list(open_counts)

    def of(self, value: Any, inside: bool) -> tuple[Any, ...]:
        """The template of a value. ``inside``: of an object."""
        if isinstance(value, torch.Tensor):
            self.tensors += 1
            return ("tensor", self.tensors - 1)
        if inside and is_count(value):
            self._counts += 1
            number = self._counts - 1
            return ("count", self._open.index(number)) if number in self._open else ("value", value)
        if is_object(value):
            fields = fields_of(value).items()
            held = tuple((name, self.of(item, inside=True)) for name, item in fields)
            kind = "fixed" if is_fixed(type(value)) else "object"
            return ("named" if isinstance(value, tuple) else kind, held, type(value))
        if isinstance(value, (tuple, list)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return (kind, tuple(self.of(item, inside) for item in value))
        if isinstance(value, dict):
            return ("dict", tuple((key, self.of(item, inside)) for key, item in value.items()))
        return ("value", value)


def _build(
    template: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    counts: Sequence[Any],
    objects: list[Any],
) -> Any:
    kind, held = template[0], template[1]
    if kind == "tensor":
        return tensors[held]
    if kind == "count":
        return counts[held]
    if kind == "tuple":
        return tuple([_build(item, tensors, counts, objects) for item in held])
    if kind == "list":
        return [_build(item, tensors, counts, objects) for item in held]
    if kind == "dict":
        return {key: _build(item, tensors, counts, objects) for key, item in held}
    if kind == "object":
        made = object.__new__(template[2])
        objects.append(made)
        for name, item in held:
            setattr(made, name, _build(item, tensors, counts, objects))
        return made
    if kind == "fixed":  # by its constructor: see `check_constructors`
        index = len(objects)
        objects.append(None)
        given = {name: _build(item, tensors, counts, objects) for name, item in held}
        objects[index] = template[2](**given)
        return objects[index]
    if kind == "named":
        index = len(objects)
        objects.append(None)
        items = [_build(item, tensors, counts, objects) for _, item in held]
        objects[index] = template[2](*items)
        return objects[index]
    return held


def check_constructors(objects: Sequence[Any]) -> None:
    """Raises CompileRefused for an object that its class does not make of its attributes."""
    for value in objects:
        kind = type(value)
        if not is_fixed(kind):
            continue
        try:
            fields = fields_of(value)
            made = kind(*fields.values()) if isinstance(value, tuple) else kind(**fields)
        except Exception as error:
            raise CompileRefused(f"a {kind.__name__} cannot be made anew: {error}") from error
        if type(made) is not kind or _identity(made) != _identity(value):
            raise CompileRefused(f"a {kind.__name__} is not what its constructor makes of it")


def _identity(value: Any) -> tuple[Any, ...]:
    items = value.items() if isinstance(value, dict) else ()
    return tuple([(name, id(part)) for name, part in (*fields_of(value).items(), *items)])


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
        empty = [part for part in node.args[0] if part not in parts]
        graph.erase_node(node)
        for part in empty:
            _erase_unread(graph, part)


def _erase_unread(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Leaves out a copy of a constant that nothing reads, which cannot be traced again."""
    aten = torch.ops.aten
    copies = (aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
    while not node.users and node.target in copies:
        (source,) = node.args
        graph.erase_node(node)
        node = source


def with_objects(
    outputs: str,
    answer: Any,
    structure: Structure,
    changes: Sequence[Change],
    stores: ModuleStores | None = None,
) -> str:
    """The text of `read_outputs` for what `OpenedCall` returns, as `build_unflatten` reads it.

    ``answer`` and ``changes`` are those of a run, ``stores`` of the call. Raises CompileRefused
    where the trace differs.
    """
    values: list[Any] = []
    take(structure, answer, values)
    traced = json.loads(outputs)["leaves"]
    leaves, rest = traced[: len(values)], iter(traced[len(values) :])
    for change in changes:
        constant = isinstance(change.value, CONSTANTS)
        leaves.append(stored_constant(change.value) if constant else next(rest))
        values.append(change.value)
    for leaf, value in zip(leaves[len(values) - len(changes) :], changes, strict=True):
        if is_count(value.value) and "tensor" in leaf:
            leaf["count"] = leaf.pop("tensor")
    for leaf, value in zip(leaves, values, strict=True):
        if "count" in leaf:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        is_made = "tensor" in leaf or "detached" in leaf
        if is_tensor != is_made or not (is_tensor or _stored(value) == leaf):
            raise CompileRefused("what it makes besides tensors is another thing in a trace")
    of_objects, of_modules = (
        [[change.index, list(change.place)] for change in changes if change.of_module is of_module]
        for of_module in (False, True)
    )
    given, again = ((), ()) if stores is None else (stores.given, stores.again)
    rows = {
        "stores": of_modules,
        "given": [[place.module, list(place.steps), number] for place, number in given],
        "again": [[place.module, list(place.steps), number] for place, number in again],
    }
    made = {"answer": structure, "changes": of_objects, "leaves": leaves}
    return json.dumps(made | {name: found for name, found in rows.items() if found})


def _stored(value: Any) -> dict[str, Any]:
    return stored_constant(value) if isinstance(value, CONSTANTS) else {"value": value}
