"""What a trace asks of values and goes on with as a constant, without a guard.

TorchDynamo answers `hasattr`, `getattr` with a default, `isinstance` and `issubclass` while it
traces, and takes constants among the builtins as they are. Here each such question is written down.
"""

from __future__ import annotations

import abc
import builtins
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from eagercache.callables.code_values import MISSING, is_covered
from eagercache.callables.guard_rows import GuardRow, Path, attribute, describe, resolve
from eagercache.worker.compat.folded_calls import is_answered_by_worker, is_run_by_worker
from eagercache.worker.compat.noted_calls import after, before, before_class, before_item
from eagercache.worker.inductor.commands import CompileRefused

# Its classes are registered with no abstract class but when they are imported.
_KNOWN_LIBRARY = "transformers"
_IDENTITY = frozenset((operator.is_, operator.is_not))
# Functions that ask no metaclass of the program, or have guards of their own.
_OF_ANY_CLASS = _IDENTITY | {
    *(getattr, hasattr, setattr, delattr, type, super, id, callable, print),
}


class Questions:
    """The questions of the traces in a `recorded` block.

    Attributes:
        attributes: where a value is (a source of Dynamo's) and the name that it was asked for, by
            both names.
        builtins: names of builtin constants that were read.
        functions: those that ran and that Dynamo knows no place of.
    """

    def __init__(self) -> None:
        self.attributes: dict[tuple[str, str], tuple[Any, str]] = {}
        self.builtins: dict[str, None] = {}
        self.functions: dict[types.FunctionType, None] = {}
        # Sources of tensors that were asked to be one, and of those that were keys of dicts; None
        # for what the forward makes.
        self._compared: list[list[Any]] = []
        self._keys: list[Any] = []
        # Sources of tensors whose class was asked for, and whether the answer may be another one.
        self._typed: list[tuple[Any, bool]] = []
        self._refused = ""

    def check(self, path_of: Callable[[Any], Path | None]) -> None:
        """Raises CompileRefused where an answer may be another one later, which nobody sees.

        ``path_of``: from a source to where it is; what the module has begins with "self".
        """
        if self._refused:
            raise CompileRefused(self._refused)

        def is_own(source: Any) -> bool:
            path = None if source is None else path_of(source)
            return path is not None and path[0][0] == "self"

        # The key of a call says which arguments are one tensor, and not which are the module's.
        groups = (set(map(is_own, group)) for group in (*self._compared, self._keys))
        if any(len(group) == 2 for group in groups):
            raise CompileRefused("the forward asks whether a tensor is one of its own")
        # The identity of a module does not say which of its tensors are parameters, and Dynamo
        # takes each for a plain tensor. The key of a call says it of the arguments.
        if any(is_wrong or is_own(source) for source, is_wrong in self._typed):
            raise CompileRefused("the forward asks whether a tensor is a parameter")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What Dynamo traces in this block is recorded. Not for several threads."""
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase, compare_op_handlers
        from torch._dynamo.variables.builtin import BuiltinVariable
        from torch._dynamo.variables.functions import (
            PolyfilledFunctionVariable,
            UserFunctionVariable,
        )
        from torch._dynamo.variables.tensor import TensorVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        with ExitStack() as undo:
            for kind in _classes_with("call_obj_hasattr"):
                before(undo, kind, "call_obj_hasattr", self._attribute)
            # Not what it calls: such handlers are kept from trace to trace.
            before(undo, BuiltinVariable, "call_function", self._operator)
            for name in ("is", "is not"):  # operators hold the method of before
                before_item(undo, compare_op_handlers, name, self._identity)
            for name in {"get_python_hash", "hash_impl"} & vars(TensorVariable).keys():
                before(undo, TensorVariable, name, self._key)
            before_class(undo, self._class_of_tensor)
            before(undo, TorchInGraphFunctionVariable, "call_function", self._setting)
            after(undo, TorchInGraphFunctionVariable, "call_function", self._answer)
            after(undo, PolyfilledFunctionVariable, "call_function", self._state)
            before(undo, UserFunctionVariable, "bind_args", self._function)
            name = "load_builtin_from_argval"
            before(undo, InstructionTranslatorBase, name, self._builtin)
            yield

    def _attribute(self, asked: Any, _: Any, name: str) -> None:
        source = getattr(asked, "source", None)
        if source is not None:
            self.attributes.setdefault((str(source.name), name), (source, name))

    def _builtin(self, _: Any, name: str) -> None:
        if name in vars(builtins) and not callable(vars(builtins)[name]):
            self.builtins[name] = None

    def _function(self, asked: Any, *_: Any) -> None:
        function = asked.fn
        if asked.get_source() is None and not is_covered(str(function.__module__)):
            self.functions[function] = None

    def _setting(self, asked: Any, *_: Any, **__: Any) -> None:
        if not self._refused and is_answered_by_worker(asked.value):
            self._refuse_answer(asked.value)

    def _answer(self, result: Any, asked: Any, _: Any, given: Any, named: Any) -> None:
        if not self._refused and is_run_by_worker(asked, given, named, result):
            self._refuse_answer(asked.value)

    def _state(self, result: Any, asked: Any, tx: Any, given: Any, named: Any) -> None:
        """What a function of Python's own says without being given anything: a recursion limit.

        Python's library asks for that, too (`inspect.unwrap`), and only ends a loop by it.
        """
        where = str(tx.f_globals.get("__name__", ""))
        if self._refused or given or named or (is_covered(where) and where != "__main__"):
            return
        if result.is_python_constant():
            self._refuse_answer(asked.fn)

    def _refuse_answer(self, function: Any) -> None:
        name = getattr(function, "__name__", "")
        self._refused = f"the forward calls {name}(), which a worker answers for itself"

    def _operator(self, asked: Any, translator: Any, given: Any, *_: Any, **__: Any) -> None:
        """Notes a question of classes, and what Dynamo computes with a class of the program."""
        if asked.fn in _IDENTITY:
            self._identity(translator, given)
        if asked.fn is type and len(given) == 1:
            self._class_of_tensor(given[0].realize())
        if self._refused or asked.fn in _OF_ANY_CLASS:
            return
        values = [part.realize() for part in given]
        if asked.fn in (isinstance, issubclass):
            self._kind(translator, *values)
            return
        for value in values:
            kind = vars(value).get("value")  # of others a property may raise
            if isinstance(kind, type) and not is_covered(type(kind).__module__):
                name = getattr(asked.fn, "__name__", "")
                self._refused = f"the forward computes {name} of the class {kind.__qualname__}"

    def _identity(self, translator: Any, given: Any, *_: Any) -> None:
        """Notes a question whether two things are one, which Dynamo answers without a guard.

        What Dynamo runs in the place of Python's own code asks it of lists to compare them sooner,
        and `copy.deepcopy`, whether it has found the list that stands for nothing.
        """
        from torch._dynamo.variables.tensor import TensorVariable

        parts = [part.realize() for part in given]
        if all(isinstance(part, TensorVariable) for part in parts):
            self._compared.append([part.source for part in parts])
        elif (
            all(map(_is_container, parts))
            and not self._refused
            and not _asked_by_library(translator)
        ):
            # The key of a call and the identity of a module say what is in them alone.
            self._refused = "the forward asks whether two lists, tuples, sets or dicts are one"

    def _class_of_tensor(self, asked: Any, *, is_instance: bool = False) -> None:
        """Notes that the class of a tensor was asked for, if ``asked`` is one that is given.

        ``is_instance``: by `isinstance`, which Dynamo answers rightly.
        """
        from torch._dynamo.variables.tensor import TensorVariable

        if isinstance(asked, TensorVariable) and asked.source is not None:
            held = asked.proxy.node.meta.get("example_value")
            is_wrong = not is_instance and isinstance(held, torch.nn.Parameter)
            self._typed.append((asked.source, is_wrong))

    def _key(self, asked: Any, *_: Any) -> None:
        """Notes a tensor that is looked up in a dict, which is by identity."""
        self._keys.append(asked.source)

    def _kind(self, translator: Any, asked: Any, kinds: Any) -> None:
        try:
            kind, asked_for = _type_of(asked), kinds.as_python_constant()
        except Exception:  # others than these Dynamo refuses, in words of its own
            # `torch.nn.Parameter` is a value for Dynamo and no constant; a tuple may hold it.
            kind, asked_for = None, getattr(kinds, "value", torch.nn.Parameter)
        # A module that assigns its own buffer to itself has torch ask what to register it as.
        by_module = translator.f_globals.get("__name__") == torch.nn.Module.__module__
        for other in _flat(asked_for):
            if not by_module and other is not torch.Tensor and issubclass(other, torch.Tensor):
                self._class_of_tensor(asked, is_instance=True)
            if kind is None:
                continue
            if not self._refused and not _is_settled(kind, other):
                self._refused = (
                    f"the forward asks whether a {kind.__qualname__} is a {other.__qualname__}, "
                    "and another class may be registered as one"
                )


def row_of_class(path: Path, guard: Any, module: torch.nn.Module) -> GuardRow | None:
    """What an object of the program has of its class, where it has nothing of that name itself.

    Dynamo reads it from the class: what the object is given later stands on no path of a guard.
    """
    name = guard.create_fn.keywords.get("attr")
    owner = resolve(path, module)
    if not isinstance(name, str) or isinstance(owner, (type, torch.Tensor, torch.nn.Module)):
        return None
    place: Path = (*path, ("attr", name))
    value = resolve(place, module)
    if is_covered(type(owner).__module__) or value is MISSING:
        return None
    return GuardRow(place, "value", None, describe(value, "value", None, module))


def _type_of(asked: Any) -> Any:
    try:
        return asked.python_type()
    except NotImplementedError:
        return asked.as_python_constant()


def _asked_by_library(translator: Any) -> bool:
    name = str(translator.f_globals.get("__name__"))
    return name == "copy" or name.startswith("torch._dynamo.")


def _is_container(asked: Any) -> bool:
    try:
        kind = _type_of(asked)
    except Exception:  # Dynamo refuses it, in words of its own
        return False
    return isinstance(kind, type) and issubclass(kind, (list, tuple, dict, set, frozenset))


def _flat(kinds: Any) -> Iterator[type]:
    if isinstance(kinds, types.UnionType):
        kinds = kinds.__args__
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if isinstance(kind, tuple):
            yield from _flat(kind)
        elif isinstance(kind, type):
            yield kind


def _is_settled(kind: type, other: type) -> bool:
    """Whether it is clear from the bases of ``kind`` alone whether it is a subclass of ``other``.

    Of an abstract class it may be one by `abc.ABCMeta.register`, which leaves no trace in either.
    """
    if other in kind.__mro__ or not isinstance(other, abc.ABCMeta):
        return True
    if kind in (type, abc.ABCMeta):  # a class, which Dynamo asks about while it makes an object
        return True
    packages = {one.__module__.partition(".")[0] for one in (kind, other)}
    both_covered = is_covered(kind.__module__) and is_covered(other.__module__)
    return both_covered or packages == {_KNOWN_LIBRARY}


def _classes_with(name: str) -> list[type]:
    from torch._dynamo.variables.base import VariableTracker

    found: dict[type, None] = {}
    waiting: list[type] = [VariableTracker]
    while waiting:
        kind = waiting.pop()
        found[kind] = None
        kinds: list[type] = kind.__subclasses__()
        waiting += [below for below in kinds if below not in found]
    return [kind for kind in found if name in vars(kind)]


def restored(effects: Any) -> Iterator[str]:
    """Names, as Dynamo has them, of objects whose attributes a trace changed and put back."""
    from torch._dynamo.output_graph import _get_source_debug_name

    for variable, attributes in effects.store_attr_mutations.items():
        owner = getattr(variable, "value", MISSING)
        source = getattr(variable, "source", None)
        # Of a container its items may be other ones.
        if owner is MISSING or source is None or isinstance(owner, (dict, list, set, deque)):
            continue
        if all(_is_as_it_was(owner, name, new) for name, new in attributes.items()):
            yield _get_source_debug_name(source)


def assigned_sizes(effects: Any) -> Iterator[tuple[torch.nn.Module, str]]:
    """Attributes of modules to which a trace assigns a size that is open, or a tuple with one."""
    for variable, attributes in effects.store_attr_mutations.items():
        owner = getattr(variable, "value", None)
        if isinstance(owner, torch.nn.Module):
            yield from ((owner, name) for name, new in attributes.items() if _is_open(new))


def _is_open(variable: Any) -> bool:
    from torch._dynamo.variables import SymNodeVariable
    from torch._dynamo.variables.lists import BaseListVariable

    if isinstance(variable, BaseListVariable):
        return any(map(_is_open, variable.items))
    return isinstance(variable, SymNodeVariable)


def _is_as_it_was(owner: Any, name: str, new: Any) -> bool:
    if not new.is_python_constant():
        return False
    before, after = attribute(owner, name), new.as_python_constant()
    same = type(before) is type(after) and type(after) in (int, float, str, bytes)
    return before is after or (same and repr(before) == repr(after))
