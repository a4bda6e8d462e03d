"""What a module is: the part of its kernels' key that is not in the call.

Two modules with equal identities compute the same function of their tensors and arguments: same
classes with the same code, same tree, equal plain attributes, tensors of the same metadata under
the same names. What cannot be written down (an open file, a lock, somebody else's tensor in a list)
makes the module unfit, with the reason, unless it is asked for as one of `opaque`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import (
    class_code,
    filled_cells,
    is_covered,
    is_of_program,
    plain_value,
    type_name,
)
from eagercache.callables.made_classes import class_row, hides_a_value
from eagercache.callables.module_tensors import (
    OWN_ATTRIBUTES,
    TensorSlot,
    groups_of,
    items_of,
    sharing,
    tensor_row,
)
from eagercache.calls.array_contents import contents_row
from eagercache.calls.code_digest import code_digest
from eagercache.calls.fixed_values import fixed_row
from eagercache.calls.known_hooks import are_known, collectors, written_hooks
from eagercache.calls.opaque import ROW, OpaqueAttribute, Placeholder, left_out

FORMAT = 1

# What `fully_shard` sets on all modules below the one that it is given, for the compiler alone.
SHARDING_MARKS = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params"})

# Attributes of objects that differ from process to process and say nothing: transformers keeps a
# hash of a generation's settings, to see later whether somebody has changed them.
NOT_COMPARED = frozenset({"_original_object_hash"})

_Entry = tuple[str, str, tuple[str | int, ...]]

_MAX_DEPTH = 12
_MAX_ITEMS = 20_000


class Unfit(Exception):
    """The module cannot be described; the text is one clause that says what stands in the way."""


class Unsettled(Unfit):
    """It cannot be described now: its next forward renews what it keeps beside its tensors."""


@dataclass(frozen=True)
class Identity:
    """What `identify` finds."""

    text: str  # canonical JSON
    slots: tuple[TensorSlot, ...]
    modules: tuple[tuple[str, torch.nn.Module], ...]
    hooked: frozenset[str]  # those, by their paths, whose hooks are in the text
    arrays: tuple[Any, ...] = ()  # of numpy, whose values are in the text
    opaque: tuple[OpaqueAttribute, ...] = ()  # which the text has as being there
    holders: tuple[Any, ...] = ()  # what leads from attributes to modules of the tree
    leads_back: bool = False  # whether something among attributes leads to a slot's tensor

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether ``module``, which was described, still is that. May raise Unfit.

        Other tensors of the same metadata do not show in the text.
        """
        now = identify(module, allow_opaque=bool(self.opaque))
        objects = (
            [*(slot.tensor for slot in found.slots), *(one.value for one in found.opaque)]
            for found in (self, now)
        )
        return self.text == now.text and all(a is b for a, b in zip(*objects, strict=True))

    def guard_entries(self, attributes: Mapping[str, list[Any]] | None = None) -> list[Any]:
        """What the core's guard is made of.

        A module, its tensors' kinds, names and steps, where its hooks are in the text the variables
        of the context that have to be without a value for them, and of ``attributes`` the rows of
        its path.
        """
        rows = attributes or {}
        by_path: dict[str, list[_Entry]] = {path: [] for path, _ in self.modules}
        for slot in self.slots:
            by_path[slot.path].append((slot.kind, slot.name, slot.steps))
        return [
            (
                *(module, by_path[path]),
                collectors(module) if path in self.hooked else None,
                rows.get(path),
            )
            for path, module in self.modules
        ]


def identify(module: torch.nn.Module, *, allow_opaque: bool = False) -> Identity:
    """Describes ``module`` and everything below it. Raises Unfit.

    With ``allow_opaque`` also a module with attributes that cannot be written down, for those who
    see to it that the forward reads none of them.
    """
    # A module that stands in two places is written down in both, and guarded once.
    places = list(module.named_modules(remove_duplicate=False))
    if len(places) > _MAX_ITEMS:
        raise Unfit("it has too many modules")
    first: dict[int, str] = {}
    modules: list[tuple[str, torch.nn.Module]] = []
    for path, part in places:
        if first.setdefault(id(part), path) == path:
            modules.append((path, part))
    items = items_of(modules)
    slots = [
        _checked(slot)
        for path, part in modules
        for slot in (*_slots_of(path, part), *items.get(path, ()))
    ]
    hooked = frozenset(path for path, part in modules if are_known(part))
    # A weight that a hook computes is moved by the first call, not with the module.
    if hooked and len({slot.tensor.device for slot in slots if slot.tensor.numel() != 0}) > 1:
        raise Unsettled("its tensors are on several devices")
    rows: list[Any] = []
    own = {id(slot.tensor): slot.full_name for slot in reversed(slots)}
    writer = Writer(own, left_out(module) if allow_opaque else None, first)
    kinds: dict[type, list[Any]] = {}
    for path, part in places:
        if first[id(part)] != path:
            rows.append([path, "same", first[id(part)]])
            continue
        kind = type(part)
        if not issubclass(kind, torch.nn.Module):
            raise Unfit(f"{kind.__name__} is no torch.nn.Module")
        if kind not in kinds:
            kinds[kind] = class_row(kind)
        attributes = _attributes(writer, path, part)
        if path in hooked:
            attributes.extend(
                written_hooks(part, functools.partial(writer.write, where=path, depth=0))
            )
        rows.append([path, kinds[kind], attributes, _names(part)])
    unread = {(one.path, one.name) for one in writer.opaque}
    slots = [slot for slot in slots if slot.kind != "item" or (slot.path, slot.name) not in unread]
    tensors = [tensor_row(slot) for slot in slots]
    text = json.dumps(
        {"format": FORMAT, "modules": rows, "tensors": tensors, "shared": sharing(slots)},
        separators=(",", ":"),
    )
    found = (tuple(writer.arrays), tuple(writer.opaque), tuple(writer.holders.values()))
    return Identity(text, tuple(slots), tuple(modules), hooked, *found, writer.leads_back)


def _names(module: torch.nn.Module) -> list[Any]:
    return [
        [name for name in group if group[name] is None]
        for group in (module._parameters, module._buffers, module._modules)
    ]


def _slots_of(path: str, module: torch.nn.Module) -> Iterator[TensorSlot]:
    for kind, group in groups_of(module):
        for name, tensor in group.items():
            if tensor is not None:
                yield TensorSlot(path, kind, name, tensor)


def _checked(slot: TensorSlot) -> TensorSlot:
    """Raises Unfit for a tensor that no kernel takes."""
    tensor = slot.tensor
    if torch.nn.parameter.is_lazy(tensor):
        raise Unsettled(f"{slot.full_name} has no size before the first call")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unfit(f"{slot.full_name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise Unfit(f"{slot.full_name} is not a dense tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unfit(f"{slot.full_name} is on {tensor.device}")
    return slot


def _attributes(writer: Writer, path: str, module: torch.nn.Module) -> list[Any]:
    rows = []
    for name, value in sorted(vars(module).items()):
        if name in OWN_ATTRIBUTES | SHARDING_MARKS or isinstance(value, torch.Tensor):
            continue
        if name == "_compiled_call_impl":
            if value is not None:
                raise Unfit("torch.compile was applied to it")
            continue
        # What hides a method of the class may be called by code that is in no trace. And torch's
        # wrappers (DistributedDataParallel) read what they have: their parts are tried at once.
        needed = is_covered(type(module).__module__) or callable(getattr(type(module), name, None))
        rows.append([name, writer.write_attribute(value, path, name, needed=needed)])
    return rows


def never_changes(holder: Any) -> bool:
    """Whether what a holder of modules leads to in one step is the same for as long as it lives."""
    return type(holder) in (tuple, types.MethodType, functools.partial)


class Writer:
    """Turns attribute values into canonical JSON.

    ``own``: names of a module's own tensors, by identity. One of them in a list, or behind a weak
    reference (of which `torch.nn.RNNBase` has both), is a second way to what the guard holds. So
    are the modules of its ``tree``, by identity their paths, but for the module itself, which no
    list may keep alive.

    Attributes:
        holders: by identity, what leads to modules of the tree, which are written by their paths.
        leads_back: whether what was written led to one of the module's own tensors.
    """

    def __init__(
        self,
        own: Mapping[int, str] | None = None,
        left_out: Collection[tuple[str, str]] | None = None,
        tree: Mapping[int, str] | None = None,
    ) -> None:
        self._own = own or {}
        self._tree = tree or {}
        self._left_out = left_out  # None: nothing may be opaque
        self._left = _MAX_ITEMS
        self._active: dict[int, Any] = {}
        self.arrays: list[Any] = []
        self.holders: dict[int, Any] = {}
        self.opaque: list[OpaqueAttribute] = []
        self.leads_back = False

    def write_attribute(self, value: Any, path: str, name: str, *, needed: bool) -> Any:
        """The attribute ``name`` of the module at ``path``. Raises Unfit.

        ``needed``: whether it may be read unseen, or certainly is, so that it may not be opaque.
        """
        where = f"{path}.{name}" if path else name
        reason = f"attribute {where} changes from call to call"
        if needed or not self._left_out or (path, name) not in self._left_out:
            left, arrays, holders = self._left, len(self.arrays), len(self.holders)
            try:
                return self.write(value, where, 0)
            except Unsettled:
                raise
            except Unfit as error:
                if needed or self._left_out is None:
                    raise
                reason = str(error)
            self._left = left
            del self.arrays[arrays:]
            while len(self.holders) > holders:
                self.holders.popitem()
        is_shared = plain_value(value) is not None or isinstance(value, (tuple, frozenset))
        self.opaque.append(OpaqueAttribute(path, name, value, reason, is_shared))
        return ROW

    def write(self, value: Any, where: str, depth: int) -> Any:
        """``value`` as canonical JSON. Raises Unfit, naming the attribute ``where``."""
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise Unfit(f"attribute {where} is too large to compare")
        if type(value) is Placeholder:
            return ROW
        plain = plain_value(value)
        if plain is None:
            plain = fixed_row(value)
        if plain is not None:
            return plain
        if id(value) in self._active:
            return ["cycle"]
        self._active[id(value)] = value
        try:
            return self._composite(value, where, depth + 1)
        finally:
            del self._active[id(value)]

    def _composite(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._own:
                raise Unfit(f"attribute {where} holds a tensor inside a container")
            self.leads_back = True
            return ["tensor", self._own[id(value)]]
        if type(value) is weakref.ref:
            return ["reference", self._referred(value(), where)]
        if isinstance(value, torch.nn.Module):
            return self._module(value, where)
        name = type_name(value)
        array = contents_row(value)
        if array is not None:
            self.arrays.append(value)
            return array
        if not is_covered(type(value).__module__) and hides_a_value(value):
            raise Unfit(f"attribute {where} is a {type(value).__name__}, which cannot be compared")
        items = self._items(value, where, depth)
        if items is not None:
            beside = vars(value) if is_of_program(value) else {}
            attributes = [["beside items", *self._rows(beside, where, depth)]] if beside else []
            return [name, *items, *attributes]
        if isinstance(value, functools.partial):
            return [name, self.write((value.func, value.args, value.keywords), where, depth)]
        if isinstance(value, types.MethodType):
            owner = self._owner(value.__self__, where, depth)
            return [name, self.write(value.__func__, where, depth), owner]
        if isinstance(value, types.FunctionType):
            return self._function(value, where, depth)
        if not is_of_program(value):
            raise Unfit(f"attribute {where} is a {type(value).__name__}, which cannot be compared")
        return [
            name,
            class_code(type(value)),
            *self._rows(vars(value), where, depth),
        ]

    def _module(self, value: torch.nn.Module, where: str) -> Any:
        """Which one of the tree it is: whoever is called there."""
        path = self._tree.get(id(value))
        if not path:
            kind = "a module that is not registered" if path is None else "the module itself"
            raise Unfit(f"attribute {where} holds {kind}")
        holders = {key: one for key, one in self._active.items() if one is not value}
        if any(isinstance(one, (set, frozenset)) for one in holders.values()):
            raise Unfit(f"attribute {where} holds a submodule in a set")
        self.holders.update(holders)
        return ["submodule", path]

    def _owner(self, value: Any, where: str, depth: int) -> Any:
        """Whose a bound method is."""
        is_module = isinstance(value, torch.nn.Module)
        if is_module and not self._tree:
            return ["module"]
        if not is_module or self._tree.get(id(value)) != "":
            return self.write(value, where, depth)
        if not all(map(never_changes, self._active.values())):
            raise Unfit(f"attribute {where} holds a method of the module itself")
        self.holders.update(self._active)
        return ["submodule", ""]

    def _rows(self, attributes: Mapping[str, Any], where: str, depth: int) -> list[Any]:
        return [
            [key, self.write(item, f"{where}.{key}", depth)]
            for key, item in sorted(attributes.items())
            if key not in NOT_COMPARED
        ]

    def _items(self, value: Any, where: str, depth: int) -> list[Any] | None:
        """What a container holds; None of something else."""
        if isinstance(value, (list, tuple)):
            return [self.write(item, where, depth) for item in value]
        if isinstance(value, (set, frozenset)):
            return [sorted(json.dumps(self.write(item, where, depth)) for item in value)]
        if isinstance(value, Mapping):
            return [
                [self.write(k, where, depth), self.write(v, where, depth)] for k, v in value.items()
            ]
        return None

    def _referred(self, value: Any, where: str) -> str:
        if id(value) in self._own:
            self.leads_back = True
            return self._own[id(value)]
        if value is None or isinstance(value, torch.Tensor):
            # As in an RNN whose weights were replaced.
            raise Unsettled(f"attribute {where} refers to a tensor that is no longer the module's")
        raise Unfit(f"attribute {where} is a weak reference, which cannot be compared")

    def _function(self, value: types.FunctionType, where: str, depth: int) -> Any:
        cells = []
        for _, content in filled_cells(value):
            if isinstance(content, torch.nn.Module):
                raise Unfit(f"attribute {where} is a function around a module")
            cells.append(self.write(content, where, depth))
        defaults = self.write((value.__defaults__, value.__kwdefaults__), where, depth)
        return [
            "function",
            value.__module__,
            value.__qualname__,
            code_digest(value.__code__),
            defaults,
            cells,
        ]
