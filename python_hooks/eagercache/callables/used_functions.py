"""The Python functions that a forward runs: recorded by name, and found again in another process.

They are known only after the forward ran. Their code and what they read are compared before a
kernel is used elsewhere; what they do besides computing keeps a call from having one.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import functions_in, is_covered, values_digest
from eagercache.callables.guard_rows import MARK, EnvironmentReads, failed_guard
from eagercache.callables.made_classes import classes_of_main, functions_of_main
from eagercache.callables.module_identity import Unfit
from eagercache.calls.code_digest import code_digest

# Whoever asks a logger whether it is enabled does something else where it is.
_LOGGING = frozenset(
    getattr(logging.Logger, name).__code__
    for name in (
        *("debug", "info", "warning", "error", "critical", "exception", "log"),
        *("isEnabledFor", "handle"),
    )
)
# These tell torch of a class, or find by a tensor's type what computes with it, and remember it: a
# table that says what this process met before, on which no answer depends.
_NOTHING_OF_THE_CALL = frozenset(
    (
        ("transformers.utils.generic", "_register_model_output_pytree_node"),
        ("einops._backends", "get_backend"),
    )
)
# What torch is asked for that no key has.
_NO_KEY_HAS = frozenset(
    (
        *(torch.get_autocast_dtype, torch.get_autocast_cpu_dtype, torch.get_autocast_gpu_dtype),
        torch.is_autocast_cache_enabled,
    )
)
# What code may ask a function or class for that is no guard's.
_NO_GUARD_HAS = frozenset(("__annotations__", "__doc__"))
# A context manager that is made of a function has that one's.
_KEEPS_DOCUMENTATION = frozenset((contextlib._GeneratorContextManagerBase.__init__.__code__,))
_WARNING = (warnings.warn, warnings.warn_explicit)  # functions of C
# How Python calls an operator by its name.
_OPERATOR_CALLS = frozenset(
    kind.__call__.__code__ for kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
)
# Not operators of programs: a graph's own, and such as wait for other processes.
_NO_PROGRAMS = frozenset(
    ("", "aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd")
)


def is_of_programs(operator: str) -> bool:
    """Whether "space::name" is an operator of a program, or of a library beside PyTorch."""
    return operator.partition("::")[0] not in _NO_PROGRAMS


def _called_operator(frame: types.FrameType) -> str:
    """The operator of a program that a frame is about to call; "" for none."""
    if frame.f_code not in _OPERATOR_CALLS:
        return ""
    target = frame.f_locals.get("self")
    name = getattr(target, "_qualified_op_name", None) or target._schema.name  # type: ignore[union-attr]
    return name if is_of_programs(name) else ""


def _is_nothing_of_the_call(frame: types.FrameType) -> bool:
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in _NOTHING_OF_THE_CALL


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


def _is_made_for_a_named_tuple(frame: types.FrameType) -> bool:
    """Whether the frame is of a constructor that `collections.namedtuple` made."""
    namespace = frame.f_globals
    return (
        namespace.get("_tuple_new") is tuple.__new__
        and str(namespace.get("__name__", "")).startswith("namedtuple_")
        and isinstance(frame.f_locals.get("_cls"), type)
    )


@functools.cache
def matches_by_place(code: types.CodeType) -> bool:
    """Whether a pattern as `case Point(x)` reads `__match_args__`, which nothing guards."""
    return any(
        instruction.opname == "MATCH_CLASS" and instruction.arg
        for instruction in dis.get_instructions(code)
    )


def _is_of_no_key(function: Any) -> bool:
    return isinstance(function, types.BuiltinFunctionType) and function in _NO_KEY_HAS


class CodeIndex:
    """Names for the code of one Python module's functions, the same in every process.

    A path is "Class.method" or "function", and "/N" for the N-th code object nested in it.
    """

    def __init__(self, namespace: Mapping[str, Any], classes: tuple[type, ...] = ()) -> None:
        self.namespace = namespace
        self._by_code: dict[types.CodeType, str] = {}
        self._named: dict[types.CodeType, dict[str, None]] = {}  # but for nested ones
        self._by_path: dict[str, types.CodeType] = {}
        self._functions: dict[str, types.FunctionType] = {}  # but for nested ones
        for name, value in list(namespace.items()):
            self._add_value(str(name), value)
        for kind in classes:
            self._add_class(kind.__qualname__, kind)

    def paths_of(self, code: types.CodeType) -> list[str]:
        """The names of ``code``: of all functions with it, since each may hold other values.

        None at all when it does not belong to the module.
        """
        named = self._named.get(code, {})
        return [*named] or [self._by_code[code]] if code in self._by_code else []

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
            if self._functions.setdefault(path, function) is function:
                self._named.setdefault(function.__code__, {})[path] = None
            self._add_code(path, function.__code__)

    def _add_code(self, path: str, code: types.CodeType) -> None:
        if path in self._by_path:
            return
        self._by_path[path] = code
        self._by_code.setdefault(code, path)
        nested = [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for number, part in enumerate(nested):
            self._add_code(f"{path}/{number}", part)


def _outside_of_python(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame itself, or the one that called into Python's own library."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in sys.stdlib_module_names or name == "__main__":
            break
        frame = frame.f_back
    return frame


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
    """The first recorded function or value that is another one in this process, or None."""
    for (name, path, code, values), index in indexed(rows, module):
        if index is None or index.find(path) != (code, values):
            return f"{name}.{path}"
    return failed_guard(rows, module)


def indexed(
    rows: Iterable[list[str]], module: torch.nn.Module
) -> Iterator[tuple[list[str], CodeIndex | None]]:
    """Recorded functions with the index to find each in; None where there is no such module."""
    indexes: dict[str, CodeIndex | None] = {}
    for row in rows:
        name = row[0]
        if name == MARK:
            continue  # a guard
        if name not in indexes:
            python_module = sys.modules.get(name)
            indexes[name] = (
                None
                if python_module is None
                else CodeIndex(vars(python_module), tree_classes(module, name))
            )
        yield row, indexes[name]


class FunctionRecorder:
    """Records the Python functions that run on this thread, as a context manager.

    With ``skips_operators`` what runs within operators of the program is left out: a kernel calls
    them. ``operators`` are their names, in order.
    """

    def __init__(self, *, skips_operators: bool = False) -> None:
        self.operators: list[str] = []
        self._skips = skips_operators
        self._inside: types.FrameType | None = None  # what is left out, while it runs
        self._codes: dict[types.CodeType, Mapping[str, Any]] = {}
        self.named_tuples: dict[type, None] = {}  # whose generated constructors ran
        self._effect = ""
        self._environment = EnvironmentReads()

    def __enter__(self) -> FunctionRecorder:
        self._environment.__enter__()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._environment.__exit__()

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self._inside is not None:
            if event == "return" and frame is self._inside:
                self._inside, self._environment.recording = None, True
            return
        if event == "call":
            operator = _called_operator(frame) if self._skips else ""
            if operator:
                self.operators.append(operator)
            if operator or _is_nothing_of_the_call(frame):
                self._inside, self._environment.recording = frame, False
                return
        self._look(frame, event, argument)

    def _look(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if _is_made_for_a_named_tuple(frame):
                self.named_tuples[frame.f_locals["_cls"]] = None
                return
            self._codes.setdefault(frame.f_code, frame.f_globals)
            reads = not _NO_GUARD_HAS.isdisjoint(frame.f_code.co_names)
            if not self._effect and reads and frame.f_code not in _KEEPS_DOCUMENTATION:
                self._see("it reads annotations or documentation", _outside_of_python(frame))
            if not self._effect and matches_by_place(frame.f_code):
                self._see("it matches a class by places", _outside_of_python(frame))
            if frame.f_code in _LOGGING:
                self._see("it logs", frame.f_back)
        elif event == "c_call" and argument in _WARNING:
            self._see("it warns", frame)
        elif event == "c_call" and _is_of_no_key(argument):
            self._see("it asks torch how autocast is set", frame)

    def _see(self, effect: str, caller: types.FrameType | None) -> None:
        # What torch itself says once a process is no effect of the forward.
        name = str(caller.f_globals.get("__name__", "")) if caller is not None else ""
        top = name.partition(".")[0]
        if not self._effect and top not in {"torch", "eagercache", "logging", "warnings"}:
            self._effect = effect

    def check_effects(self) -> None:
        """Raises Unfit where code that ran does what a kernel would leave out."""
        if self._effect:
            raise Unfit(self._effect)

    def environment(self) -> list[list[str]]:
        """Guards of the environment variables that were read, as an entry keeps them.

        Raises Unfit for code that goes through all of them.
        """
        if self._environment.all:
            raise Unfit("it goes through all environment variables")
        return [guard.to_row() for guard in self._environment.guards()]

    def all_codes(self) -> Iterable[tuple[types.CodeType, Mapping[str, Any]]]:
        """All code that ran, with its global names."""
        return self._codes.items()

    def ran(self) -> Iterator[tuple[types.CodeType, str]]:
        """The code that ran outside of what the environment key covers, and its module's name."""
        for code, namespace in self._codes.items():
            name = str(namespace.get("__name__", ""))
            if not is_covered(name):
                yield code, name

    def used(self, module: torch.nn.Module, objects: Iterable[Any] = ()) -> list[UsedFunction]:
        """What ran, outside of the packages that the environment key covers. Raises Unfit.

        ``objects``: arguments whose methods may have run.
        """
        given = {kind for value in objects for kind in type(value).__mro__}
        indexes: dict[str, CodeIndex] = {}
        found = []
        for code, namespace in self._codes.items():
            name = str(namespace.get("__name__", ""))
            if is_covered(name):
                continue
            if name == MARK:  # as what einx generates
                raise Unfit(f"it runs {code.co_name}, which was executed outside of any module")
            if name not in indexes:
                of_objects = (kind for kind in given if kind.__module__ == name)
                of_main = classes_of_main.values() if name == "__main__" else ()
                classes = (*tree_classes(module, name), *of_objects, *of_main)
                sent = functions_of_main if name == "__main__" else {}
                indexes[name] = CodeIndex({**sent, **namespace}, classes)
            paths = indexes[name].paths_of(code)
            if not paths:
                raise Unfit(f"it runs {name}.{code.co_name}, which cannot be found by name")
            for path in paths:
                known = indexes[name].find(path)
                if known is not None:
                    found.append(UsedFunction(name, path, *known))
        return sorted(found, key=lambda item: (item.module, item.path))
