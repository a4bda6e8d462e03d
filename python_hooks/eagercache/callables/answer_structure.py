"""How an answer is built, where plain trees of tensors do not say it: of objects.

A forward may return the objects of its call, and objects that it made: a language model that is
called without a cache makes one. `structure_of` writes down, as JSON has it, how the answer is
built of its leaves, which are tensors and plain values; `take` collects the leaves of another
answer of that structure; `outputs.build_unflatten` builds the answer again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eagercache.callables.arguments import argument_tensors
from eagercache.callables.made_classes import (
    cannot_be_made,
    fields_of,
    find_class,
    is_model_output,
    slots_of,
)
from eagercache.callables.module_identity import Unfit
from eagercache.callables.objects import CallObjects, Change, is_object

# What is the same in every answer of one call's key, and no graph returns.
CONSTANTS = (torch.dtype, torch.device, type, enum.Enum)
_PLAIN = (bool, int, float, str, type(None))

Structure = list[Any]
_WITH_NAMES = ("dict", "output", "named", "made")


def holds_objects(answer: Any) -> bool:
    """Whether an answer has an object or a member of an enum somewhere."""
    if isinstance(answer, dict):
        of_main = type(answer) is not dict and type(answer).__module__ == "__main__"
        return of_main or any(map(holds_objects, answer.values()))
    if is_object(answer) or isinstance(answer, enum.Enum):
        return True
    return isinstance(answer, (tuple, list)) and any(map(holds_objects, answer))


def outcome_of(answer: Any, objects: CallObjects) -> Any:
    """What a call did, to be compared: its answer, and what it put into objects and attributes.

    The answer itself where there is nothing of that kind. Raises Unfit.
    """
    if not objects.may_change and not holds_objects(answer):
        return answer
    changes = objects.changes()
    structure = structure_of(answer, objects, changes)
    leaves: list[Any] = []
    take(structure, answer, leaves)
    places = [(change.of_module, change.index, *change.place) for change in changes]
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
    elif kind == "named":
        for index, (_, part) in enumerate(structure[1]):
            take(part, answer[index], leaves)
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
    elif kind in _WITH_NAMES:
        for _, part in structure[1]:
            yield from _in_objects(part, inside or kind == "made")


def structure_of(
    answer: Any, objects: CallObjects | None = None, changes: Sequence[Change] = ()
) -> Structure:
    """How an answer of a call with these objects is built, which it changed so. Raises Unfit."""
    return _Writer(objects, changes).write(answer, inside=False)


class _Writer:
    def __init__(self, objects: CallObjects | None, changes: Sequence[Change]) -> None:
        self._objects = [] if objects is None else objects.found
        self._made: list[Any] = []  # objects and what they hold that can be changed
        # What the objects were given and what they held before, by identity, and where.
        self._put = {
            id(change.value): number
            for number, change in enumerate(changes)
            if isinstance(change.value, torch.Tensor)
        }
        self._held: dict[int, list[Any]] = {}
        for index, fields in enumerate([] if objects is None else objects.fields):
            for name, part in fields.items():
                self._find(part, [index, name])

    def _find(self, value: Any, place: list[Any]) -> None:
        if isinstance(value, (torch.Tensor, tuple, list, dict)) and not is_object(value):
            self._held.setdefault(id(value), place)
        if isinstance(value, (tuple, list)) and not is_object(value):
            for position, part in enumerate(value):
                self._find(part, [*place, position])
        elif type(value) is dict:
            for key, part in value.items():
                self._find(part, [*place, key])

    def write(self, value: Any, inside: bool) -> Structure:
        """``inside``: of an object that the forward made."""
        for index, known in enumerate(self._objects):
            if value is known:
                return ["object", index]
        if isinstance(value, CONSTANTS):
            return ["constant", stored_constant(value)]
        if id(value) in self._put:
            return ["put", self._put[id(value)]]
        if id(value) in self._held:
            return ["held", *self._held[id(value)]]
        if inside and isinstance(value, (list, dict)):
            self._meet(value)
        if isinstance(value, tuple) and is_object(value):
            return self._named(value, inside)
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
        if kind.__module__ == "__main__" and find_class("__main__", kind.__qualname__) is not kind:
            raise Unfit(f"it returns a {kind.__name__}")
        return ["output", items, kind.__module__, kind.__qualname__]

    def _object(self, value: Any) -> Structure:
        kind = type(value)
        _require_found(kind)
        held = fields_of(value)
        slots = [] if isinstance(getattr(value, "__dict__", None), dict) else slots_of(kind)
        hidden = [
            name
            for name in held
            if name not in slots and _is_data_descriptor(getattr(kind, name, None))
        ]
        if hidden:
            raise Unfit(f"it returns a {kind.__name__}, whose class hides its {hidden[0]}")
        self._meet(value)
        items = [[name, self.write(item, inside=True)] for name, item in held.items()]
        return ["made", items, kind.__module__, kind.__qualname__]

    def _named(self, value: Any, inside: bool) -> Structure:
        kind = type(value)
        _require_found(kind)
        items = [[name, self.write(item, inside)] for name, item in fields_of(value).items()]
        return ["named", items, kind.__module__, kind.__qualname__]


def _require_found(kind: type) -> None:
    """Raises Unfit for a class whose objects cannot be made by its name."""
    reason = cannot_be_made(kind)
    if reason or find_class(kind.__module__, kind.__qualname__) is not kind:
        raise Unfit(f"it returns a {kind.__name__}{reason and ', ' + reason}")


def _is_data_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")


def refuse_lasting(one: Any, other: Any, objects: Sequence[Any]) -> None:
    """Raises Unfit where two answers of one call show what an answer of a kernel cannot be.

    That is one with an object, list or dict that the call did not make, or with one in two places:
    the caller may change it. ``objects``: those of the call itself, which do not count, nor do
    lists and dicts in them. No kernel gives its tensors attributes (``y.tag = "logits"``) either.
    """
    for tensor in argument_tensors((one, *objects), {}):
        given = [name for name in vars(tensor) if not name.startswith("_dynamo")]
        if given:
            raise Unfit(f"it gives a tensor that it returns an attribute ({given[0]})")
    known = {id(part) for value in objects for part in _mutable_parts(value, set(), set())}
    parts = list(_mutable_parts(one, known, set()))
    seen = {id(part) for part in parts}
    if len(seen) < len(parts):
        raise Unfit("it returns an object that is reached twice")
    for part in _mutable_parts(other, known, set()):
        if id(part) in seen:
            raise Unfit(f"it returns a {type(part).__name__}, which outlives the call")


def _mutable_parts(value: Any, known: set[int], above: set[int]) -> Iterator[Any]:
    held: Any = ()
    if id(value) in known or id(value) in above:
        return
    if is_object(value) and not isinstance(value, dict):
        yield value
        held = fields_of(value).values()
    elif isinstance(value, (list, tuple, dict)):
        if not isinstance(value, tuple):
            yield value
        held = value.values() if isinstance(value, dict) else value
    for part in held:
        yield from _mutable_parts(part, known, {*above, id(value)})


def stored_constant(value: torch.dtype | torch.device | type | enum.Enum) -> dict[str, Any]:
    """A dtype, a device, a class or a member of an enum, as JSON has it. Raises Unfit."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, enum.Enum):
        if type(value)._member_map_.get(value._name_) is not value:
            raise Unfit(f"it returns several flags of {type(value).__name__} together")
        return {**stored_constant(type(value)), "member": value._name_}
    module, path = value.__module__, value.__qualname__
    if find_class(module, path) is not value:
        raise Unfit(f"the class {path} cannot be found by its name")
    return {"class": [module, path]}


def classes_in(structure: Structure) -> Iterator[tuple[str, str]]:
    """(module, qualified name) of the classes of objects that the forward made."""
    kind, *rest = structure
    if kind in ("made", "named") or (kind == "output" and rest[1] == "__main__"):
        yield rest[1], rest[2]
    if kind == "constant" and "member" in rest[0]:
        yield rest[0]["class"]
    if kind in ("tuple", "list"):
        for part in rest[0]:
            yield from classes_in(part)
    elif kind in _WITH_NAMES:
        for _, part in rest[0]:
            yield from classes_in(part)
