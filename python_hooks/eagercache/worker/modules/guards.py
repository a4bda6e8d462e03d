"""What TorchDynamo guarded in a trace, as rows that the user's process can compare.

Dynamo's own guards hold for one process: functions and classes are compared by address. Here each
is written down by where the value is and what it is (`callables/guard_rows.py`). What cannot be
written down, and what a process could not watch, refuses the module.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import MISSING, is_covered, plain_value
from eagercache.callables.guard_rows import (
    GuardRow,
    Path,
    Step,
    describe,
    path_text,
    resolve,
    step_from,
)
from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.module_tensors import own_tensors
from eagercache.calls.known_hooks import CALL_HOOKS
from eagercache.worker.compat.copies import is_copy, source_for
from eagercache.worker.compat.guard_kinds import KINDS, OF_THE_PACKAGE, is_of_tracer
from eagercache.worker.compat.guard_sources import (
    AT_POSITION,
    NAMESPACE,
    from_opened,
    is_namespace,
    owner_of,
    path_from_self,
    scopes_of,
    steps_of,
    variable_path,
)
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.class_rows import rows_of_foreign_modules, rows_of_function
from eagercache.worker.modules.opened import INNER
from eagercache.worker.modules.questions import (
    Questions,
    assigned_sizes,
    restored,
    row_of_class,
)
from eagercache.worker.modules.reads import refuse_second_way

_BUILTINS = "__builtins_dict__"
_ALIAS = "__import_"
MAX_GUARDS = 4000


@dataclass(frozen=True)
class _Unguarded:
    """A value that Dynamo read and put no guard on: methods of C classes, contents of cells."""

    originating_source: Any
    name: str
    create_fn: Any = None

    @staticmethod
    def create_fn_name() -> str:
        return "ID_MATCH"


class DynamoGuards:
    """The guards of the last trace in a `recorded` block.

    ``opened``: the `OpenedCall` that is traced, if it is one.

    Attributes:
        assigned: attributes of modules to which the forward assigns sizes that are open.
        restored: names of objects, as Dynamo's warnings have them, whose attributes the forward
            changed and put back: after it they are what they were.
    """

    def __init__(self, *, opened: torch.nn.Module | None = None) -> None:
        self._opened = opened
        self.restored: frozenset[str] = frozenset()
        self.assigned: tuple[tuple[torch.nn.Module, str], ...] = ()
        self._guards: list[Any] = []
        self._questions = Questions()
        self._read: dict[str, Any] = {}  # sources of all values that were read, by name
        # Tensors that were read, and their sources.
        self._met: list[tuple[torch.Tensor, Any]] = []
        self._tensors: list[tuple[torch.Tensor, Any]] = []
        self._imports: dict[str, str] = {}
        self._scopes: dict[str, str] = {}  # names of modules whose globals are no module's
        self._namespace = ""
        self._module: torch.nn.Module = torch.nn.Module()
        self._names: dict[int, str] = {}  # of it and of the modules below it, by identity
        self._identity: Identity | None = None  # once somebody asked, which takes a while

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What Dynamo traces in this block is recorded. Not for several threads."""
        from torch._dynamo.output_graph import OutputGraph
        from torch._dynamo.variables.builder import VariableBuilder

        original, build = OutputGraph.compile_subgraph, VariableBuilder.__call__

        @functools.wraps(build)
        def built(builder: Any, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                self._met.append((value, builder.source))
            elif not isinstance(value, types.ModuleType):
                self._read.setdefault(builder.source.name, builder.source)
            return build(builder, value)

        @functools.wraps(original)
        def compile_subgraph(graph: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            self.restored = frozenset(restored(graph.side_effects))
            self.assigned = tuple(assigned_sizes(graph.side_effects))
            result = original(graph, tx, *args, **kwargs)
            self._guards = list(graph.guards)
            guarded = {guard.name for guard in self._guards}
            self._guards += [
                _Unguarded(source, name)
                for name, source in self._read.items()
                if name not in guarded
            ]
            self._read, self._tensors, self._met = {}, self._met, []
            self._imports = dict(graph.import_sources)
            self._scopes = scopes_of(graph)
            self._namespace = str(graph.root_tx.f_globals.get("__name__", ""))
            return result

        OutputGraph.compile_subgraph = compile_subgraph
        VariableBuilder.__call__ = built
        try:
            with self._questions.recorded():
                yield
        finally:
            OutputGraph.compile_subgraph, VariableBuilder.__call__ = original, build

    def rows(self, module: torch.nn.Module) -> list[GuardRow]:
        """What the user's process has to compare. Raises CompileRefused where it could not."""
        self._module, self._identity = module, None
        self._names = {id(part): name for name, part in module.named_modules()}
        self._questions.check(self._path)
        own = own_tensors(module)
        for value, source in self._tensors:
            if id(value) in own:
                refuse_second_way(self._path(source), module, self._is_of_program(source))
        found: dict[tuple[str, ...], GuardRow] = {}
        for row in (*(self._row(guard, module) for guard in self._guards), *self._answers()):
            if row is not None:
                found.setdefault(tuple(row.to_row()), row)
        # Also those of which no row was made: TorchDynamo guards little of PyTorch's own modules.
        read = (self._path(guard.originating_source) for guard in self._guards)
        paths = [*(row.path for row in found.values()), *filter(None, read)]
        for row in rows_of_foreign_modules(paths, module):
            found.setdefault(tuple(row.to_row()), row)
        if len(found) > MAX_GUARDS:
            raise CompileRefused(f"its forward reads {len(found)} values beside its tensors")
        return list(found.values())

    def _row(self, guard: Any, module: torch.nn.Module) -> GuardRow | None:
        source = guard.originating_source
        path = self._path(source)
        if path is None:
            if self._is_of_program(source):
                raise CompileRefused(f"the forward reads {guard.name}, which cannot be guarded")
            return None
        root, name = path[0]
        if root == "import" and is_of_tracer(str(name)):
            return None
        sort = guard.create_fn_name()
        if sort == "TENSOR_MATCH":
            says = f"the forward reads the tensor {path_text(path)}"
            if root == "import":
                raise CompileRefused(says)
            if root == "self" and not self._is_own(resolve(path, module)):
                raise CompileRefused(f"{says}, no parameter or buffer of its module")
            return None  # a parameter, a buffer or an argument
        kind = KINDS.get(sort, "")
        if kind == "":
            if root == "import":
                raise CompileRefused(f"{sort} of {path_text(path)} cannot be compared")
            return None
        if sort == "NOT_PRESENT_IN_GENERIC_DICT":
            return row_of_class(path, guard, module)
        if kind == "has":
            # Whether the attribute is there at all: what it is has guards of its own.
            return self._has(path[:-1], path[-1][1]) if path[-1][0] == "attr" else None
        value = resolve(path, module)
        if kind is None or value is MISSING or self._is_known(path, sort, value, module):
            return None
        if path[-1][0] == "key" and kind == "value" and isinstance(value, (str, int)):
            path, kind, argument = path[:-1], "contains", value
            value = resolve(path, module)
        else:
            argument = self._argument(guard, kind)
        if kind == "contains" and argument is None:
            return None
        return GuardRow(path, kind, argument, describe(value, kind, argument, module))

    def _is_own(self, value: Any) -> bool:
        """Whether a value is no tensor, or one that a kernel of the module takes."""
        if not isinstance(value, torch.Tensor):
            return True
        return any(value is slot.tensor for slot in self._described().slots)

    def _described(self) -> Identity:
        if self._identity is None:
            self._identity = identify(self._module)
        return self._identity

    def _is_holder(self, value: Any) -> bool:
        """Whether it leads to modules of the tree, and the identity says to which.

        The user's process sees what is changed in it.
        """
        try:
            return any(value is one for one in self._described().holders)
        except Unfit:  # one that is exported, and not watched, need not be described
            return False

    def _answers(self) -> Iterator[GuardRow]:
        """What the trace asked, and has no guard on."""
        for name in self._questions.builtins:
            path: Path = (("import", "builtins"), ("attr", name))
            value = resolve(path, self._module)
            yield GuardRow(path, "value", None, describe(value, "value", None, self._module))
        for function in self._questions.functions:
            yield from rows_of_function(function)
        for source, name in self._questions.attributes.values():
            place = self._path(source)
            row = None if place is None else self._has(place, name)
            if row is not None:
                yield row

    def _has(self, place: Path, name: str) -> GuardRow | None:
        """Whether a value has an attribute."""
        if place[0][0] == "import" and is_of_tracer(str(place[0][1])):
            return None
        value = resolve(place, self._module)
        if isinstance(value, torch.Tensor) and not hasattr(torch.Tensor, name):
            raise CompileRefused(f"the forward asks whether a tensor was given {name}")
        if value is MISSING or isinstance(value, (torch.Tensor, torch.nn.Module)):
            return None  # the identity of the module has its attributes
        return GuardRow(place, "has", name, describe(value, "has", name, self._module))

    def _argument(self, guard: Any, kind: str) -> Any:
        create = guard.create_fn
        given = dict(create.keywords) if isinstance(create, functools.partial) else {}
        if kind == "same":
            other = given.get("source_b")
            path = None if other is None else self._path(other)
            if path is None:
                raise CompileRefused(f"the forward reads {guard.name} under two names")
            return [list(step) for step in path]
        if kind == "contains":
            key = given.get("key", given.get("attr", given.get("item")))
            return key if isinstance(key, (str, int)) else None
        return None

    def _is_known(self, path: Path, sort: str, value: Any, module: torch.nn.Module) -> bool:
        """Whether the identity of the module or the environment key has that value already."""
        root = path[0][0]
        if isinstance(value, types.ModuleType):
            return True  # watched as a step to what is read of it
        if isinstance(value, torch.nn.Module):
            return root == "self"
        if root == "import":
            # Plain values are compared there too: a program sets them, and a worker has its own.
            plain = plain_value(value) is not None and not isinstance(value, type)
            return not plain and is_covered(owner_of(path, module)) and sort in OF_THE_PACKAGE
        if isinstance(value, type) and not is_covered(value.__module__):
            return False  # its name is known; on what is read of it TorchDynamo has no guard
        return not self._passes_an_object(path, module)

    def _passes_an_object(self, path: Path, module: torch.nn.Module) -> bool:
        """Whether a path from the module leads through more than modules and their attributes.

        Beside submodules in a list, tuple or dict the identity has plain values and methods, too.
        """
        found = resolve(path, module)
        is_plain = plain_value(found) is not None and not isinstance(found, (type, enum.Enum))
        for length in range(2, len(path)):
            value = resolve(path[:length], module)
            of_module = isinstance(value, torch.nn.Module) or path[length - 1][1] in _OF_MODULES
            beside = type(value) in _CONTAINERS and (is_plain or type(found) in _DESCRIBED)
            if not of_module and not (beside and self._is_holder(value)):
                return True
        return False

    def _is_of_program(self, source: Any) -> bool:
        while getattr(source, "base", None) is not None:
            source = source.base
        name = getattr(source, "global_name", None)
        if name is None:
            return False
        where = self._imports.get(name, self._namespace)
        return not is_covered(where) and not name.startswith(_BUILTINS) and not is_copy(name)

    def _path(self, source: Any) -> Path | None:
        """None for what is no value of Python's, and for sources that are not known here."""
        path = self._steps(source)
        if path is None:
            return None
        for position, (sort, _) in enumerate(path):
            if sort == "variable":
                return variable_path(path[:position], path[position:])
        merged: list[Step] = []
        for step in path:
            if merged and merged[-1] == AT_POSITION:
                # The key itself, so that others may come before it: that they do not, where it
                # matters, is a guard of all keys.
                key = resolve((*merged[:-1], step), self._module)
                if not isinstance(key, (str, int)):
                    return None
                merged[-1] = ("item", key)
            elif merged and step[0] == "item" and is_namespace(merged[-1], step[1]):
                merged[-1] = ("attr", step[1])
            else:
                merged.append(step)
        return self._registered(tuple(step for step in merged if step != NAMESPACE))

    def _registered(self, path: Path) -> Path:
        """A path through a module of the tree, by the names under which that is registered.

        The identity says which one a list has. Raises CompileRefused where it does not.
        """
        owner: Any = MISSING
        passed: list[Any] = []  # since a module of the tree
        rewritten = path
        for position, (step, key) in enumerate(path, 1):
            before, owner = owner, step_from(owner, step, key, self._module)
            if owner is MISSING:
                break
            name = self._names.get(id(owner)) if isinstance(owner, torch.nn.Module) else None
            if name is None:
                if not (isinstance(before, torch.nn.Module) and key in _TABLES):
                    passed.append(owner)
            elif path[0][0] != "self" or not all(map(self._is_holder, passed)):
                way = path_text(path[:position])
                raise CompileRefused(f"the forward reads a part of the module by {way}")
            elif passed:
                parts = [("item", part) for part in name.split(".")] if name else []
                tables = [step for part in parts for step in (("attr", "_modules"), part)]
                rewritten, passed = (("self", ""), *tables, *path[position:]), []
        return rewritten

    def _steps(self, source: Any) -> Path | None:
        steps: list[Step] = []
        while True:
            sort = type(source).__name__
            if sort == "LocalSource":
                path = path_from_self(source.local_name, steps)
                if path is None or self._opened is None:
                    return path
                return from_opened(path[1:], self._opened, INNER)
            if sort == "GlobalSource":
                if not is_copy(source.global_name):
                    return self._from_global(source.global_name, steps)
                source = source_for(source.global_name, steps)
                if source is None:
                    return None
                continue
            if sort == "ImportSource":
                return (("import", source.module_name), *reversed(steps))
            step = steps_of(source, sort)
            if step is None:
                return None
            steps.extend(reversed(step))
            source = source.base

    def _from_global(self, name: str, steps: list[Step]) -> Path | None:
        rest = list(reversed(steps))
        if name.startswith(_BUILTINS):
            if not rest or rest[0][0] != "item":
                return None
            return (("import", "builtins"), ("attr", rest[0][1]), *rest[1:])
        if name in self._imports:
            return (("import", self._imports[name]), *rest)
        if name in self._scopes:
            if not rest or rest[0][0] != "item":
                return None
            return (("import", self._scopes[name]), ("attr", rest[0][1]), *rest[1:])
        return (("import", self._namespace), ("attr", name), *rest)


_TABLES = frozenset(("_modules", "__dict__"))
_CONTAINERS = (list, tuple, dict)
_DESCRIBED = (*_CONTAINERS, types.MethodType)
_OF_MODULES = frozenset(("_modules", "_parameters", "_buffers", "__dict__", *CALL_HOOKS))
