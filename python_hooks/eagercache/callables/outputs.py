"""How an answer is built of its tensors. Imports little: a deployed module opens with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables.made_classes import (
    cannot_be_made,
    constant_of,
    find_class,
    is_model_output,
)

# An integer that an object holds may be a count: one that a kernel takes, and gives back, as the
# size, less this, of a tensor without elements (kCountOffset of nn_modules/arguments.h).
COUNT_OFFSET = 2


def build_unflatten(outputs: str, num_outputs: int) -> Any:
    """A function of the list of output tensors that makes the answer; None for the tensor itself.

    Where the call has objects (`takes_objects`) it is given a tuple of them, too.

    Raises ValueError for a text that does not describe ``num_outputs`` tensors.
    """
    stored = json.loads(outputs)
    leaves = stored["leaves"]
    made = ("tensor", "count") if takes_objects(outputs) else ("tensor",)
    tensors = [leaf[kind] for leaf in leaves for kind in made if kind in leaf]
    if tensors != list(range(num_outputs)):
        raise ValueError("the outputs are not numbered in order")
    if takes_objects(outputs):
        return _Objects(stored["answer"], stored["changes"], leaves)
    spec = pytree.treespec_loads(stored["spec"])
    only_tensors = len(tensors) == len(leaves)
    if only_tensors and spec == pytree.tree_structure(0):
        return None
    if only_tensors and spec == pytree.tree_structure((0,) * num_outputs):
        return tuple

    def unflatten(values: list[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(
            [values[leaf["tensor"]] if "tensor" in leaf else leaf["value"] for leaf in leaves],
            spec,
        )

    return unflatten


def takes_objects(outputs: str) -> bool:
    """Whether what `build_unflatten` makes of it is given the call's objects, too."""
    return "changes" in json.loads(outputs)


class _Objects:
    """Builds an answer, and gives the call's objects what the forward would have given them."""

    def __init__(self, answer: list[Any], changes: list[Any], leaves: list[dict[str, Any]]) -> None:
        if not all(type(index) is int and place for index, place in changes):
            raise ValueError("a change of no object")
        self._build = _builder(answer)
        self._changes = [(index, tuple(place)) for index, place in changes]
        made = [leaf if "tensor" in leaf or "count" in leaf else None for leaf in leaves]
        self._template = [
            None if kind else _plain(leaf) for kind, leaf in zip(made, leaves, strict=True)
        ]
        self._tensors = [place for place, kind in enumerate(made) if kind]
        self._counts = [place for place, leaf in enumerate(leaves) if "count" in leaf]

    def __call__(self, values: list[torch.Tensor], objects: tuple[Any, ...]) -> Any:
        leaves: list[Any] = list(self._template)
        for place, value in zip(self._tensors, values, strict=True):
            leaves[place] = value
        for place in self._counts:
            leaves[place] = leaves[place].size(0) - COUNT_OFFSET
        rest = iter(leaves)
        answer = self._build(rest, objects)
        # Last, and nothing that fails: where a kernel's answer cannot be built the forward answers.
        puts = []
        for (index, (name, *keys)), value in zip(self._changes, rest, strict=True):
            owner: Any = vars(objects[index])
            for key in keys:
                owner, name = owner[name], key
            puts.append((owner, name, value))
        for owner, name, value in puts:
            owner[name] = value
        return answer


def _plain(leaf: dict[str, Any]) -> Any:
    return leaf["value"] if "value" in leaf else constant_of(leaf)


def _builder(structure: list[Any]) -> Any:
    """A function (leaves, objects) of what `structure_of` wrote. Raises ValueError."""
    kind, *rest = structure
    if kind == "leaf":
        return lambda leaves, _: next(leaves)
    if kind == "object":
        index = int(rest[0])
        return lambda _, objects: objects[index]
    if kind == "held":
        holder, name = int(rest[0]), str(rest[1])
        return lambda _, objects: vars(objects[holder])[name]
    if kind == "constant":
        constant = constant_of(rest[0])
        return lambda *_: constant
    if kind in ("tuple", "list"):
        make: Any = tuple if kind == "tuple" else list
        parts = [_builder(item) for item in rest[0]]
        return lambda leaves, objects: make([part(leaves, objects) for part in parts])
    if kind not in ("dict", "output", "made"):
        raise ValueError(f"{kind} is nothing that a forward returns")
    finish: Any = dict if kind == "dict" else (_output if kind == "output" else _made)(*rest[1:])
    items = [(key, _builder(item)) for key, item in rest[0]]

    def build(leaves: Iterator[Any], objects: tuple[Any, ...]) -> Any:
        return finish({key: part(leaves, objects) for key, part in items})

    return build


def _output(module: str, path: str) -> Any:
    found = find_class(module, path)
    if found is None or not is_model_output(found):
        raise ValueError(f"{module}.{path} is no output of a model")
    kind: Any = found
    return lambda held: kind(**held)


def _made(module: str, path: str) -> Any:
    found = find_class(module, path)
    if found is None or cannot_be_made(found):
        raise ValueError(f"{module}.{path} is no class of plain objects")
    kind: Any = found

    def finish(held: dict[str, Any]) -> Any:
        made = object.__new__(kind)
        vars(made).update(held)
        return made

    return finish
