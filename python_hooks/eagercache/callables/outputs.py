"""How an answer is built of its tensors. Imports little: a deployed module opens with it."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables.made_classes import (
    cannot_be_made,
    constant_of,
    field_of,
    find_class,
    is_model_output,
    is_named_tuple,
    make_object,
    set_field,
)

# An integer that an object holds may be a count: one that a kernel takes, and gives back, as the
# size, less this, of a tensor without elements (kCountOffset of nn_modules/arguments.h).
COUNT_OFFSET = 2
# What an answer assigns to attributes of modules: tensors of its own, arguments, and some of the
# first once more.
_STORES = ("stores", "given", "again")


@contextlib.contextmanager
def _named_return_types() -> Iterator[None]:
    """Has pytree know names for what `max`, `sort` or `topk` return, to which it gives none.

    The program's pytree is as it was after the block.
    """
    definitions, kinds = pytree.SUPPORTED_SERIALIZED_TYPES, pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    before = {}
    for kind in torch.return_types.all_return_types:
        known = definitions.get(kind)
        if known is None or known.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            continue
        before[kind] = known
        name = f"torch.return_types.{kind.__name__}"
        definitions[kind] = known._replace(serialized_type_name=name)
        kinds[name] = kind
    try:
        yield
    finally:
        for kind, known in before.items():
            kinds.pop(definitions[kind].serialized_type_name, None)
            definitions[kind] = known


def spec_text(spec: pytree.TreeSpec) -> str:
    """A structure as text. Raises NotImplementedError for one with classes that have no name."""
    with _named_return_types():
        return pytree.treespec_dumps(spec)


def spec_in(text: str) -> pytree.TreeSpec:
    """The inverse of `spec_text`. Raises what a text that is none leads to."""
    with _named_return_types():
        return pytree.treespec_loads(text)


def build_unflatten(outputs: str, num_outputs: int) -> Any:
    """A function of the list of output tensors that makes the answer; None for the tensor itself.

    Where the call has objects, or the forward assigns to attributes (`takes_objects`), it is given
    a tuple of the objects, too, and behind them the modules of `stored_modules` and the arguments
    of `stored_arguments`.

    Raises ValueError for a text that does not describe ``num_outputs`` tensors.
    """
    stored = json.loads(outputs)
    leaves = stored["leaves"]
    made = ("tensor", "count") if takes_objects(outputs) else ("tensor",)
    tensors = [leaf[kind] for leaf in leaves for kind in made if kind in leaf]
    if tensors != list(range(num_outputs)):
        raise ValueError("the outputs are not numbered in order")
    if takes_objects(outputs):
        stores, given, again = (stored.get(kind, []) for kind in _STORES)
        return _Objects(stored["answer"], stored["changes"], stores, given, again, leaves)
    spec = spec_in(stored["spec"])
    only_tensors = len(tensors) == len(leaves)
    if only_tensors and spec == pytree.tree_structure(0):
        return None
    if only_tensors and spec == pytree.tree_structure((0,) * num_outputs):
        return tuple

    def unflatten(values: list[torch.Tensor]) -> Any:
        return pytree.tree_unflatten([_leaf(leaf, values) for leaf in leaves], spec)

    return unflatten


def _leaf(leaf: dict[str, Any], values: list[torch.Tensor]) -> Any:
    if "tensor" in leaf:
        return values[leaf["tensor"]]
    return values[leaf["detached"]].detach() if "detached" in leaf else leaf["value"]


def building(outputs: str, num_outputs: int) -> dict[str, Any]:
    """How the core builds an answer, as `load_module` takes it. Raises as `build_unflatten`."""
    return {
        "unflatten": build_unflatten(outputs, num_outputs),
        "takes_objects": takes_objects(outputs),
        "stores": stored_modules(outputs),
        "given": stored_arguments(outputs),
    }


def takes_objects(outputs: str) -> bool:
    """Whether what `build_unflatten` makes of it is given the call's objects, too."""
    return "changes" in json.loads(outputs)


def stored_modules(outputs: str) -> list[int]:
    """The modules, by their numbers in the tree, whose attributes an answer assigns."""
    stored = json.loads(outputs)
    rows = [row for kind in _STORES for row in stored.get(kind, [])]
    return sorted({int(number) for number, *_ in rows})


def stored_arguments(outputs: str) -> list[int]:
    """The tensors among the arguments, by their numbers, which an answer assigns to attributes."""
    return [int(argument) for *_, argument in json.loads(outputs).get("given", [])]


class _Objects:
    """Builds an answer, and gives the call's objects what the forward would have given them.

    So it does with attributes of modules, ``stores``.
    """

    def __init__(
        self,
        answer: list[Any],
        changes: list[Any],
        stores: list[Any],
        given: list[Any],
        again: list[Any],
        leaves: list[dict[str, Any]],
    ) -> None:
        rows = [*changes, *stores, *(row[:-1] for row in (*given, *again))]
        if not all(type(index) is int and place for index, place in rows):
            raise ValueError("a change of no object")
        self._build = _builder(answer)
        # Modules, and then arguments, are the last of the objects that a call is given.
        numbers = sorted({number for number, *_ in (*stores, *given, *again)})
        first = -len(numbers) - len(given)
        behind = {number: first + index for index, number in enumerate(numbers)}
        self._changes = [(index, tuple(place)) for index, place in changes]
        self._changes += [(behind[number], tuple(place)) for number, place in stores]
        self._given = [
            (behind[number], tuple(place), position - len(given))
            for position, (number, place, _) in enumerate(given)
        ]
        self._again = [
            (behind[number], tuple(place), len(changes) + store) for number, place, store in again
        ]
        made = [leaf if "tensor" in leaf or "count" in leaf else None for leaf in leaves]
        self._detached = [
            (place, leaf["detached"]) for place, leaf in enumerate(leaves) if "detached" in leaf
        ]
        self._template = [
            None if kind or "detached" in leaf else _plain(leaf)
            for kind, leaf in zip(made, leaves, strict=True)
        ]
        self._tensors = [place for place, kind in enumerate(made) if kind]
        self._counts = [place for place, leaf in enumerate(leaves) if "count" in leaf]

    def __call__(self, values: list[torch.Tensor], objects: tuple[Any, ...]) -> Any:
        leaves: list[Any] = list(self._template)
        for place, value in zip(self._tensors, values, strict=True):
            leaves[place] = value
        for place, tensor in self._detached:
            leaves[place] = values[tensor].detach()
        for place in self._counts:
            leaves[place] = leaves[place].size(0) - COUNT_OFFSET
        first = len(leaves) - len(self._changes)
        changed = leaves[first:]
        answer = self._build(iter(leaves[:first]), (objects, changed))
        # Last, and nothing that fails: where a kernel's answer cannot be built the forward answers.
        puts: list[tuple[Any, Any, Any, Any]] = []
        rows = list(zip(self._changes, changed, strict=True))
        rows += [((index, place), objects[position]) for index, place, position in self._given]
        rows += [((index, place), changed[store]) for index, place, store in self._again]
        for (index, (name, *keys)), value in rows:
            owner: Any = objects[index]
            put: Any = set_field
            for position, key in enumerate(keys):
                owner = owner[name] if position else field_of(owner, name)
                put, name = operator.setitem, key
            puts.append((put, owner, name, value))
        for put, owner, name, value in puts:
            put(owner, name, value)
        return answer


def _plain(leaf: dict[str, Any]) -> Any:
    return leaf["value"] if "value" in leaf else constant_of(leaf)


def _builder(structure: list[Any]) -> Any:
    """A function (leaves, call) of what `structure_of` wrote. Raises ValueError.

    ``call``: its objects, and what they are given.
    """
    kind, *rest = structure
    if kind == "leaf":
        return lambda leaves, _: next(leaves)
    if kind in ("object", "put"):
        part, index = int(kind == "put"), int(rest[0])
        return lambda _, call: call[part][index]
    if kind == "held":
        return _held(int(rest[0]), str(rest[1]), rest[2:])
    if kind == "constant":
        constant = constant_of(rest[0])
        return lambda *_: constant
    if kind in ("tuple", "list"):
        make: Any = tuple if kind == "tuple" else list
        parts = [_builder(item) for item in rest[0]]
        return lambda leaves, call: make([part(leaves, call) for part in parts])
    makers: dict[str, Any] = {"output": _output, "named": _named, "made": _made}
    if kind not in ("dict", *makers):
        raise ValueError(f"{kind} is nothing that a forward returns")
    finish: Any = dict if kind == "dict" else makers[kind](*rest[1:])
    items = [(key, _builder(item)) for key, item in rest[0]]

    def build(leaves: Iterator[Any], call: tuple[Any, ...]) -> Any:
        return finish({key: part(leaves, call) for key, part in items})

    return build


def _held(index: int, name: str, keys: list[Any]) -> Any:
    """A function that gives the very thing that an object of the call holds."""

    def find(_: Iterator[Any], call: tuple[Any, ...]) -> Any:
        found = field_of(call[0][index], name)
        for key in keys:
            found = found[key]
        return found

    return find


def _output(module: str, path: str) -> Any:
    found = find_class(module, path)
    if found is None or not is_model_output(found):
        raise ValueError(f"{module}.{path} is no output of a model")
    kind: Any = found
    return lambda held: kind(**held)


def _named(module: str, path: str) -> Any:
    found = find_class(module, path)
    if found is None or not is_named_tuple(found):
        raise ValueError(f"{module}.{path} is no named tuple")
    kind: Any = found

    def finish(held: dict[str, Any]) -> Any:
        if tuple(held) != kind._fields:
            raise ValueError(f"{module}.{path} has other fields")
        return make_object(kind, held)

    return finish


def _made(module: str, path: str) -> Any:
    found = find_class(module, path)
    if found is None or cannot_be_made(found):
        raise ValueError(f"{module}.{path} is no class of plain objects")
    kind: Any = found
    return lambda held: make_object(kind, held)
