"""How an answer is built, where plain trees of tensors do not say it: of objects.

A forward may return the objects of its call, and objects that it made: a language model that is
called without a cache makes one. `structure_of` writes down, as JSON has it, how the answer is
built of its leaves, which are tensors and plain values; `take` collects the leaves of another
answer of that structure; `outputs.build_unflatten` builds the answer again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eagercache.callables.made_classes import (
    cannot_be_made,
    find_class,
    is_fixed,
    is_model_output,
)
from eagercache.callables.module_identity import Unfit
from eagercache.callables.objects import CallObjects, is_object

# What is the same in every answer of one call's key, and no graph returns.
CONSTANTS = (torch.dtype, torch.device, type)
_PLAIN = (bool, int, float, str, type(None))

Structure = list[Any]


def holds_objects(answer: Any) -> bool:
    """Whether an answer has an object somewhere."""
    if isinstance(answer, dict):
        return any(map(holds_objects, answer.values()))
    if isinstance(answer, (tuple, list)):
        return any(map(holds_objects, answer))
    return is_object(answer)


def outcome_of(answer: Any, objects: CallObjects) -> Any:
    """What a call did, to be compared: its answer, and what it put into its objects.

    The answer itself where there are no objects in either. Raises Unfit.
    """
    if not objects.found and not holds_objects(answer):
        return answer
    structure = structure_of(answer, objects.found)
    leaves: list[Any] = []
    take(structure, answer, leaves)
    changes = objects.changes()
    places = [(change.index, *change.place) for change in changes]
    return repr((structure, places)), leaves, [change.value for change in changes]


def take(structure: Structure, answer: Any, leaves: list[Any]) -> None:
    """Collects the leaves of an answer. Also run by TorchDynamo, inside of a trace."""
    kind = structure[0]
    if kind == "leaf":
        leaves.append(answer)
    elif kind in ("tuple", "list"):
        for index, part in enumerate(structure[1]):
            take(part, answer[index], leaves)
    elif kind in ("dict", "output"):
        for (_, part), item in zip(structure[1], answer.values(), strict=True):
            take(part, item, leaves)
    elif kind == "made":
        for name, part in structure[1]:
            take(part, getattr(answer, name), leaves)


def in_objects(structure: Structure) -> list[bool]:
    """For each leaf that `take` collects whether an object that the forward made holds it."""
    return list(_in_objects(structure, inside=False))


def _in_objects(structure: Structure, inside: bool) -> Iterator[bool]:
    kind = structure[0]
    if kind == "leaf":
        yield inside
    elif kind in ("tuple", "list"):
        for part in structure[1]:
            yield from _in_objects(part, inside)
    elif kind in ("dict", "output", "made"):
        for _, part in structure[1]:
            yield from _in_objects(part, inside or kind == "made")


def structure_of(answer: Any, objects: Sequence[Any]) -> Structure:
    """How an answer of a call with these objects is built. Raises Unfit."""
    return _Writer(objects).write(answer, inside=False)


class _Writer:
    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._made: list[Any] = []  # objects and what they hold that can be changed

    def write(self, value: Any, inside: bool) -> Structure:
        """``inside``: of an object that the forward made."""
        for index, known in enumerate(self._objects):
            if value is known:
                return ["object", index]
        if isinstance(value, CONSTANTS):
            return ["constant", stored_constant(value)]
        if isinstance(value, (torch.Tensor, tuple)):
            place = self._held(value)
            if place is not None:
                return ["held", *place]
        if inside and isinstance(value, (list, dict)):
            self._meet(value)
        if type(value) in (tuple, list):
            return [type(value).__name__, [self.write(item, inside) for item in value]]
        if isinstance(value, dict):
            return self._dictionary(value, inside)
        if isinstance(value, (tuple, list)):
            raise Unfit(f"it returns a {type(value).__name__}")
        if is_object(value):
            return self._object(value)
        if inside and type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
            raise Unfit(f"it returns an object that holds a {type(value).__name__}")
        return ["leaf"]

    def _held(self, value: Any) -> tuple[int, str] | None:
        """Which attribute of which object the value is, of those whose attributes stay."""
        for index, known in enumerate(self._objects):
            if is_fixed(type(known)):
                for name, part in vars(known).items():
                    if part is value:
                        return index, name
        return None

    def _meet(self, value: Any) -> None:
        if any(value is known for known in self._made):
            raise Unfit("it returns an object that is reached twice")
        self._made.append(value)

    def _dictionary(self, value: dict[Any, Any], inside: bool) -> Structure:
        kind = type(value)
        allowed = (str, int) if inside and kind is dict else (str,)
        if not all(type(key) in allowed for key in value):
            raise Unfit("it returns a dict whose keys are no text")
        items = [[key, self.write(item, inside)] for key, item in value.items()]
        if kind is dict:
            return ["dict", items]
        if not is_model_output(kind) or "<locals>" in kind.__qualname__:
            raise Unfit(f"it returns a {kind.__name__}")
        return ["output", items, kind.__module__, kind.__qualname__]

    def _object(self, value: Any) -> Structure:
        kind = type(value)
        reason = cannot_be_made(kind)
        if reason or find_class(kind.__module__, kind.__qualname__) is not kind:
            raise Unfit(f"it returns a {kind.__name__}{reason and ', ' + reason}")
        held = vars(value)
        hidden = [name for name in held if _is_data_descriptor(getattr(kind, name, None))]
        if hidden:
            raise Unfit(f"it returns a {kind.__name__}, whose class hides its {hidden[0]}")
        self._meet(value)
        items = [[name, self.write(item, inside=True)] for name, item in held.items()]
        return ["made", items, kind.__module__, kind.__qualname__]


def _is_data_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")


def lasting_part(one: Any, other: Any, objects: Sequence[Any]) -> Any:
    """What the objects in two answers of one call share, so that it was not made by it; or None.

    ``objects``: those of the call itself, which do not count.
    """
    known = {id(value) for value in objects}
    seen = {id(part) for part in _mutable_parts(one, known, inside=False)}
    parts = _mutable_parts(other, known, inside=False)
    return next((part for part in parts if id(part) in seen), None)


def _mutable_parts(value: Any, known: set[int], inside: bool) -> Iterator[Any]:
    held: Any = ()
    if id(value) in known:
        return
    if isinstance(value, (list, tuple, dict)):
        if inside and not isinstance(value, tuple):
            yield value
        held = value.values() if isinstance(value, dict) else value
    elif is_object(value):
        yield value
        held, inside = vars(value).values(), True
    for part in held:
        yield from _mutable_parts(part, known, inside)


def stored_constant(value: torch.dtype | torch.device | type) -> dict[str, Any]:
    """A dtype, a device or a class, as JSON has it. Raises Unfit."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    module, path = value.__module__, value.__qualname__
    if find_class(module, path) is not value:
        raise Unfit(f"the class {path} cannot be found by its name")
    return {"class": [module, path]}


def classes_in(structure: Structure) -> Iterator[tuple[str, str]]:
    """(module, qualified name) of the classes of objects that the forward made."""
    kind, *rest = structure
    if kind == "made":
        yield rest[1], rest[2]
    if kind in ("tuple", "list"):
        for part in rest[0]:
            yield from classes_in(part)
    elif kind in ("dict", "output", "made"):
        for _, part in rest[0]:
            yield from classes_in(part)
