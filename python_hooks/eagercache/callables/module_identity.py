"""What a module is: the part of its kernels' key that is not in the call.

Two modules with equal identities compute the same function of their tensors and arguments: same
classes with the same code, same tree, equal plain attributes, tensors of the same metadata under
the same names. What cannot be written down (an open file, a lock, a tensor in a list) makes the
module unfit, with the reason.

The functions that a forward really ran are known only after it was traced; `CodeIndex` finds them
again, by name, in another process, so that their code can be compared before a kernel is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import (
    class_code,
    code_digest,
    filled_cells,
    functions_in,
    is_covered,
    plain_value,
    type_name,
    values_digest,
)

FORMAT = 1

# What `fully_shard` sets on all modules below the one that it is given, for the compiler alone.
SHARDING_MARKS = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params"})

# Attributes of torch.nn.Module itself: hooks are looked at on every call, the rest does not change
# what a forward computes.
OWN_ATTRIBUTES = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_is_full_backward_hook",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_version",
        "dump_patches",
    }
)

# Attributes of objects that differ from process to process and say nothing: transformers keeps a
# hash of a generation's settings, to see later whether somebody has changed them.
NOT_COMPARED = frozenset({"_original_object_hash"})

_MAX_DEPTH = 12
_MAX_ITEMS = 20_000

# Whoever asks a logger whether it is enabled does something else where it is.
_LOGGING = frozenset(
    getattr(logging.Logger, name).__code__
    for name in (
        *("debug", "info", "warning", "error", "critical", "exception", "log"),
        *("isEnabledFor", "handle"),
    )
)
_WARNING = frozenset(
    function.__code__
    for function in (warnings.warn, warnings.warn_explicit)
    if isinstance(function, types.FunctionType)  # C's in most versions of Python
)


class Unfit(Exception):
    """The module cannot be described; the text is one clause that says what stands in the way."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of the tree, in the order in which the guard holds them."""

    path: str  # of the module that owns it, "" for the root
    kind: str  # "parameter", "buffer" or "attribute"
    name: str
    tensor: torch.Tensor

    @property
    def full_name(self) -> str:
        """The name as `named_parameters` and an exported program spell it."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(frozen=True)
class Identity:
    """What `identify` finds."""

    text: str  # canonical JSON
    slots: tuple[TensorSlot, ...]
    modules: tuple[tuple[str, torch.nn.Module], ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def guard_entries(self) -> list[tuple[torch.nn.Module, list[tuple[str, str]]]]:
        """What the core's guard is made of."""
        by_path: dict[str, list[tuple[str, str]]] = {path: [] for path, _ in self.modules}
        for slot in self.slots:
            by_path[slot.path].append((slot.kind, slot.name))
        return [(module, by_path[path]) for path, module in self.modules]


def identify(module: torch.nn.Module) -> Identity:
    """Describes ``module`` and everything below it. Raises Unfit."""
    # A module that stands in two places is written down in both, and guarded once.
    places = list(module.named_modules(remove_duplicate=False))
    if len(places) > _MAX_ITEMS:
        raise Unfit("it has too many modules")
    first: dict[int, str] = {}
    slots: list[TensorSlot] = []
    modules: list[tuple[str, torch.nn.Module]] = []
    rows: list[Any] = []
    writer = Writer()
    kinds: dict[type, list[Any]] = {}
    for path, part in places:
        if id(part) in first:
            rows.append([path, "same", first[id(part)]])
            continue
        first[id(part)] = path
        modules.append((path, part))
        kind = type(part)
        if kind not in kinds:
            kinds[kind] = _class_row(kind)
        rows.append([path, kinds[kind], _attributes(writer, path, part), _names(part)])
        slots.extend(_slots_of(path, part))
    tensors = [_tensor_row(slot) for slot in slots]
    text = json.dumps(
        {"format": FORMAT, "modules": rows, "tensors": tensors, "shared": _sharing(slots)},
        separators=(",", ":"),
    )
    return Identity(text, tuple(slots), tuple(modules))


def _names(module: torch.nn.Module) -> list[Any]:
    return [
        [name for name in group if group[name] is None]
        for group in (module._parameters, module._buffers, module._modules)
    ]


def _slots_of(path: str, module: torch.nn.Module) -> Iterator[TensorSlot]:
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("parameter", module._parameters),
        ("buffer", module._buffers),
        ("attribute", {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}),
    )
    for kind, group in groups:
        for name, tensor in group.items():
            if tensor is None:
                continue
            slot = TensorSlot(path, kind, name, tensor)
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise Unfit(f"{slot.full_name} is a {type(tensor).__name__}, not a plain tensor")
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.numel() == 0:
                raise Unfit(f"{slot.full_name} is not a dense tensor with elements")
            if tensor.device.type not in ("cpu", "cuda"):
                raise Unfit(f"{slot.full_name} is on {tensor.device}")
            yield slot


def _tensor_row(slot: TensorSlot) -> list[Any]:
    tensor = slot.tensor
    return [
        slot.full_name,
        slot.kind,
        str(tensor.dtype),
        tensor.device.type,
        list(tensor.size()),
        list(tensor.stride()),
        tensor.data_ptr() % 64 == 0,
    ]


def _sharing(slots: list[TensorSlot]) -> list[list[int]]:
    """Slots that are one tensor: a kernel is traced for exactly that."""
    groups: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        groups.setdefault(id(slot.tensor), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _attributes(writer: Writer, path: str, module: torch.nn.Module) -> list[Any]:
    rows = []
    for name, value in sorted(vars(module).items()):
        if name in OWN_ATTRIBUTES | SHARDING_MARKS or isinstance(value, torch.Tensor):
            continue
        if name == "_compiled_call_impl":
            if value is not None:
                raise Unfit("torch.compile was applied to it")
            continue
        where = f"{path}.{name}" if path else name
        rows.append([name, writer.write(value, where, 0)])
    return rows


def _class_row(kind: type) -> list[Any]:
    """A class by name, its package's version and the code of its methods, bases included."""
    if not issubclass(kind, torch.nn.Module):
        raise Unfit(f"{kind.__name__} is no torch.nn.Module")
    bases = [
        [base.__module__, base.__qualname__, class_code(base)]
        for base in kind.__mro__
        if not is_covered(base.__module__)
    ]
    return [kind.__module__, kind.__qualname__, package_version(kind.__module__), bases]


def package_version(module_name: str) -> str:
    """``__version__`` of a module's top-level package, or ""."""
    top = sys.modules.get(module_name.partition(".")[0])
    return str(getattr(top, "__version__", ""))


class Writer:
    """Turns attribute values into canonical JSON."""

    def __init__(self) -> None:
        self._left = _MAX_ITEMS
        self._active: set[int] = set()

    def write(self, value: Any, where: str, depth: int) -> Any:
        """``value`` as canonical JSON. Raises Unfit, naming the attribute ``where``."""
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise Unfit(f"attribute {where} is too large to compare")
        plain = plain_value(value)
        if plain is not None:
            return plain
        if id(value) in self._active:
            return ["cycle"]
        self._active.add(id(value))
        try:
            return self._composite(value, where, depth + 1)
        finally:
            self._active.discard(id(value))

    def _composite(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            raise Unfit(f"attribute {where} holds a tensor inside a container")
        if isinstance(value, torch.nn.Module):
            raise Unfit(f"attribute {where} holds a module that is not registered")
        name = type_name(value)
        if isinstance(value, (list, tuple)):
            return [name, *(self.write(item, where, depth) for item in value)]
        if isinstance(value, (set, frozenset)):
            return [name, sorted(json.dumps(self.write(item, where, depth)) for item in value)]
        if isinstance(value, Mapping):
            rows = [
                [self.write(k, where, depth), self.write(v, where, depth)] for k, v in value.items()
            ]
            return [name, *rows]
        if isinstance(value, functools.partial):
            return [name, self.write((value.func, value.args, value.keywords), where, depth)]
        if isinstance(value, types.MethodType):
            owner = value.__self__
            part = (
                ["module"]
                if isinstance(owner, torch.nn.Module)
                else self.write(owner, where, depth)
            )
            return [name, self.write(value.__func__, where, depth), part]
        if isinstance(value, types.FunctionType):
            return self._function(value, where, depth)
        state = getattr(value, "__dict__", None)
        if not isinstance(state, dict) or is_covered(type(value).__module__):
            raise Unfit(f"attribute {where} is a {type(value).__name__}, which cannot be compared")
        return [
            name,
            class_code(type(value)),
            *(
                [key, self.write(item, f"{where}.{key}", depth)]
                for key, item in sorted(state.items())
                if key not in NOT_COMPARED
            ),
        ]

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


# ---- code ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UsedFunction:
    """A function that a trace ran, as an entry records it."""

    module: str
    path: str
    code: str  # code_digest
    values: str  # values_digest

    def to_row(self) -> list[str]:
        """As JSON."""
        return [self.module, self.path, self.code, self.values]


class CodeIndex:
    """Names for the code of one Python module's functions, the same in every process.

    A path is "Class.method" or "function", and "/N" for the N-th code object nested in it.
    """

    def __init__(self, namespace: Mapping[str, Any], classes: tuple[type, ...] = ()) -> None:
        self.namespace = namespace
        self._by_code: dict[types.CodeType, str] = {}
        self._by_path: dict[str, types.CodeType] = {}
        self._functions: dict[str, types.FunctionType] = {}  # but for nested ones
        for name, value in list(namespace.items()):
            self._add_value(str(name), value)
        for kind in classes:
            self._add_class(kind.__qualname__, kind)

    def path_of(self, code: types.CodeType) -> str | None:
        """The name of ``code``; None when it does not belong to the module."""
        return self._by_code.get(code)

    def code(self, path: str) -> tuple[types.CodeType, types.FunctionType | None] | None:
        """What has that name now; the function is None for nested ones."""
        code = self._by_path.get(path)
        return None if code is None else (code, self._functions.get(path))

    def find(self, path: str) -> tuple[str, str] | None:
        """(code_digest, values_digest) of what has that name now."""
        found = self.code(path)
        if found is None:
            return None
        code, function = found
        return code_digest(code), values_digest(code, self.namespace, function)

    def _add_value(self, name: str, value: Any) -> None:
        if isinstance(value, type):
            self._add_class(name, value)
            return
        self._add_functions(name, value)

    def _add_class(self, name: str, kind: type) -> None:
        for attribute, value in list(vars(kind).items()):
            self._add_functions(f"{name}.{attribute}", value)

    def _add_functions(self, name: str, value: Any) -> None:
        for number, function in enumerate(functions_in(value)):
            path = name if number == 0 else f"{name}~{number}"
            self._functions.setdefault(path, function)
            self._add_code(path, function.__code__)

    def _add_code(self, path: str, code: types.CodeType) -> None:
        if path in self._by_path:
            return
        self._by_path[path] = code
        self._by_code.setdefault(code, path)
        nested = [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for number, part in enumerate(nested):
            self._add_code(f"{path}/{number}", part)


def tree_classes(module: torch.nn.Module, module_name: str) -> tuple[type, ...]:
    """The classes of a module tree, bases included, that ``module_name`` defines."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    return tuple(
        sorted(
            (kind for kind in kinds if kind.__module__ == module_name),
            key=lambda kind: kind.__qualname__,
        )
    )


def changed_function(rows: list[list[str]], module: torch.nn.Module) -> str | None:
    """The first recorded function whose code is another one in this process; None when none is."""
    for (name, path, code, values), index in indexed(rows, module):
        if index is None or index.find(path) != (code, values):
            return f"{name}.{path}"
    return None


def indexed(
    rows: Iterable[list[str]], module: torch.nn.Module
) -> Iterator[tuple[list[str], CodeIndex | None]]:
    """Recorded functions with the index to find each in; None where there is no such module."""
    indexes: dict[str, CodeIndex | None] = {}
    for row in rows:
        name = row[0]
        if name not in indexes:
            python_module = sys.modules.get(name)
            indexes[name] = (
                None
                if python_module is None
                else CodeIndex(vars(python_module), tree_classes(module, name))
            )
        yield row, indexes[name]


class FunctionRecorder:
    """Records the Python functions that run on this thread, as a context manager."""

    def __init__(self) -> None:
        self._codes: dict[types.CodeType, Mapping[str, Any]] = {}
        self._effect = ""

    def __enter__(self) -> FunctionRecorder:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._codes.setdefault(frame.f_code, frame.f_globals)
            if frame.f_code in _LOGGING:
                self._see("it logs", frame.f_back)
            elif frame.f_code in _WARNING:
                self._see("it warns", frame.f_back)
        elif event == "c_call" and argument in (warnings.warn, warnings.warn_explicit):
            self._see("it warns", frame)

    def _see(self, effect: str, caller: types.FrameType | None) -> None:
        # What torch itself says once a process is no effect of the forward.
        top = str(caller.f_globals.get("__name__", "")) if caller is not None else ""
        if not self._effect and top.partition(".")[0] not in ("torch", "logging", "warnings"):
            self._effect = effect

    def check_effects(self) -> None:
        """Raises Unfit where code that ran does what a kernel would leave out."""
        if self._effect:
            raise Unfit(self._effect)

    def all_codes(self) -> Iterable[tuple[types.CodeType, Mapping[str, Any]]]:
        """All code that ran, with its global names."""
        return self._codes.items()

    def ran(self) -> Iterator[tuple[types.CodeType, str]]:
        """The code that ran outside of what the environment key covers, and its module's name."""
        for code, namespace in self._codes.items():
            name = str(namespace.get("__name__", ""))
            if not is_covered(name):
                yield code, name

    def used(self, module: torch.nn.Module) -> list[UsedFunction]:
        """What ran, outside of the packages that the environment key covers. Raises Unfit."""
        indexes: dict[str, CodeIndex] = {}
        found = []
        for code, namespace in self._codes.items():
            name = str(namespace.get("__name__", ""))
            if is_covered(name):
                continue
            if name not in indexes:
                indexes[name] = CodeIndex(namespace, tree_classes(module, name))
            path = indexes[name].path_of(code)
            if path is None:
                raise Unfit(f"it runs {name}.{code.co_name}, which cannot be found by name")
            known = indexes[name].find(path)
            if known is not None:
                found.append(UsedFunction(name, path, *known))
        return sorted(found, key=lambda item: (item.module, item.path))
