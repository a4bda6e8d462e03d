"""What a Python function is: the part of its kernels' key that is not in the call.

Two functions with equal identities compute the same: equal code, in themselves and in every Python
function that they can reach by name, equal defaults, closures and global values. Code of torch and
of the standard library is left to the environment key. What cannot be written down (a tensor, a
module, an open file) and what is plainly an effect (a print, a store to a global variable) makes
the function unfit, with the line.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import class_code, is_covered
from eagercache.callables.module_identity import Unfit, Writer
from eagercache.calls.code_digest import code_digest

FORMAT = 1
MAX_FUNCTIONS = 400

# What is called for its effect, or answers otherwise each time.
_EFFECTS = frozenset({"print", "input", "open", "exec", "eval", "globals", "setattr", "delattr"})
_CHANGING_MODULES = frozenset({"random", "time", "secrets", "os", "datetime", "uuid", "socket"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SET_TYPES = frozenset({"set", "frozenset"})
# The order of a set comes of hashes, which Python draws anew for words in each process, and of what
# was added when: a kernel would have its maker's. `value in members` asks for none.
_SET_ORDER = "a set, whose order each process makes anew; sort it into a tuple"
_ANEW = "which each process has anew"
_MISSING = object()


class OperatorOfFunction:
    """An operator that is a Python function: code that calls it is read as calling that."""

    @property
    def function(self) -> Any:
        """The function itself."""
        raise NotImplementedError


@dataclass(frozen=True)
class FunctionIdentity:
    """What `identify_function` finds.

    Attributes:
        digest: equal for equal functions, in every process.
        codes: `code_digest` of everything that may run, torch and the standard library left out.
        modules: names of the Python modules that those functions belong to.
    """

    digest: str
    codes: frozenset[str]
    modules: tuple[str, ...]


def identify_function(function: types.FunctionType) -> FunctionIdentity:
    """The identity of ``function`` now. Raises Unfit; the text begins with the line."""
    walk = _Walk()
    walk.enter(function)
    text = json.dumps([FORMAT, walk.rows()], separators=(",", ":"))
    return FunctionIdentity(
        hashlib.sha256(text.encode()).hexdigest(),
        frozenset(walk.codes),
        tuple(sorted(walk.modules)),
    )


def refuse_effects(function: types.FunctionType) -> None:
    """Raises Unfit for what the function's own code shows to be an effect."""
    for code in nested_codes(function.__code__):
        for instruction in dis.get_instructions(code):
            _refuse_instruction(code, instruction)


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and the code of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


def _line(code: types.CodeType, instruction: dis.Instruction) -> str:
    # Instructions have positions since Python 3.11.
    number = getattr(getattr(instruction, "positions", None), "lineno", None)
    if number is None:
        starts = [line for offset, line in dis.findlinestarts(code) if offset <= instruction.offset]
        number = starts[-1] if starts else None
    return f"line {number or code.co_firstlineno} of {code.co_name}"


def _refuse_instruction(code: types.CodeType, instruction: dis.Instruction) -> None:
    name = instruction.opname
    if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        raise Unfit(f"{_line(code, instruction)}: it changes the global {instruction.argval}")
    if name in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
        raise Unfit(
            f"{_line(code, instruction)}: it changes {instruction.argval} of the function around it"
        )
    if name in ("YIELD_VALUE", "GET_AWAITABLE") and code.co_name not in ("<genexpr>",):
        raise Unfit(f"{_line(code, instruction)}: it is a generator")
    if name in _ATTRIBUTES and instruction.argval == "__hash__":
        raise Unfit(f"{_line(code, instruction)}: it asks for a hash, {_ANEW}")
    if name == "LOAD_GLOBAL" and instruction.argval in ("id", "hash"):
        raise Unfit(f"{_line(code, instruction)}: it asks for {instruction.argval}(), {_ANEW}")
    if name == "LOAD_GLOBAL" and instruction.argval in _EFFECTS:
        raise Unfit(f"{_line(code, instruction)}: it calls {instruction.argval}()")


def _refuse_sets(code: types.CodeType) -> None:
    for instruction, after in _pairs(code):
        count = instruction.arg or 0
        made = (
            instruction.opname in ("SET_ADD", "SET_UPDATE")
            or (instruction.opname == "BUILD_SET" and count > 1)
            or (instruction.opname == "LOAD_GLOBAL" and instruction.argval in _SET_TYPES)
            or _has_an_order(instruction.argval)
        )
        # What a display is filled from is loaded before; the filling is looked at.
        if made and after not in ("CONTAINS_OP", "SET_UPDATE"):
            raise Unfit(f"{_line(code, instruction)}: it makes {_SET_ORDER}")


def _pairs(code: types.CodeType) -> Iterator[tuple[dis.Instruction, str]]:
    """Each instruction, and the name of the one after it."""
    instructions = list(dis.get_instructions(code))
    names = [instruction.opname for instruction in instructions[1:]]
    return zip(instructions, [*names, ""], strict=True)


def _has_an_order(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and len(value) > 1


def _asked_alone(whole: types.CodeType) -> frozenset[str]:
    """Names of the functions around it that are only asked whether they have a member."""
    names = set(whole.co_freevars)
    for code in nested_codes(whole):
        for instruction, after in _pairs(code):
            loaded = instruction.opname not in ("LOAD_CLOSURE", "COPY_FREE_VARS")
            if loaded and after != "CONTAINS_OP":
                names.discard(instruction.argval)
    return frozenset(names)


class _UnorderedWriter(Writer):
    def _composite(self, value: Any, where: str, depth: int) -> Any:
        if _has_an_order(value):
            raise Unfit(_SET_ORDER)
        return super()._composite(value, where, depth)

    def unordered(self, value: Any) -> Any:
        """A set of which no order is seen; its members are written as all else is."""
        return super()._composite(value, "", 0)


class _Walk:
    def __init__(self) -> None:
        self._rows: dict[int, list[Any]] = {}
        self._kept: list[Any] = []  # ids stay unique as long as the objects live
        self._order: list[int] = []
        self._waiting: list[types.FunctionType] = []
        self._writer = _UnorderedWriter()
        self.codes: set[str] = set()
        self.modules: set[str] = set()

    def enter(self, function: types.FunctionType) -> None:
        self._number(function)
        while self._waiting:
            self._read(self._waiting.pop(0))

    def rows(self) -> list[Any]:
        return [self._rows[number] for number in range(len(self._order))]

    def _number(self, function: types.FunctionType) -> int:
        if id(function) in self._order:
            return self._order.index(id(function))
        if len(self._order) >= MAX_FUNCTIONS:
            raise Unfit("it can reach too many functions to compare")
        self._kept.append(function)
        self._order.append(id(function))
        self._waiting.append(function)
        return len(self._order) - 1

    def _read(self, function: types.FunctionType) -> None:
        refuse_effects(function)
        number = self._number(function)
        self.modules.add(str(function.__module__))
        uses: list[Any] = []
        asked = _asked_alone(function.__code__)
        for code in nested_codes(function.__code__):
            _refuse_sets(code)
            self.codes.add(code_digest(code))
            uses += self._uses(code, function)
        where = f"line {function.__code__.co_firstlineno} of {function.__code__.co_name}"
        cells = [
            [name, self._value(_content(cell, where, name), f"{where}: {name}", name in asked)]
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            )
        ]
        defaults = [
            self._value(value, f"{where}: a default")
            for value in (function.__defaults__ or (), function.__kwdefaults__ or {})
        ]
        self._rows[number] = [
            function.__module__,
            function.__qualname__,
            code_digest(function.__code__),
            defaults,
            cells,
            uses,
        ]

    def _uses(self, code: types.CodeType, function: types.FunctionType) -> list[Any]:
        """What ``code`` names outside of itself: [dotted name, what that is now]."""
        rows: list[Any] = []
        chain: list[str] = []
        current: Any = _MISSING
        where = ""
        for instruction in [*dis.get_instructions(code), None]:
            if (
                instruction is not None
                and chain
                and instruction.opname in _ATTRIBUTES
                and isinstance(current, (types.ModuleType, type))
                and hasattr(current, str(instruction.argval))
            ):
                chain.append(str(instruction.argval))
                current = getattr(current, chain[-1])
                continue
            if chain:
                asked = instruction is not None and instruction.opname == "CONTAINS_OP"
                name = ".".join(chain)
                rows.append([name, self._value(current, f"{where}: {name}", asked)])
                chain = []
            if instruction is None:
                break
            if instruction.opname == "IMPORT_NAME" and not is_covered(str(instruction.argval)):
                raise Unfit(f"{_line(code, instruction)}: it imports {instruction.argval}")
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                where = _line(code, instruction)
                chain = [str(instruction.argval)]
                current = _global(function, chain[0], where)
        return rows

    def _value(self, value: Any, where: str, asked: bool = False) -> Any:
        """``asked``: whether all that is done with it is to ask whether it has a member."""
        if _has_an_order(value):
            if not asked:
                raise Unfit(f"{where} is {_SET_ORDER}")
            return self._writer.unordered(value)
        if isinstance(value, OperatorOfFunction):
            value = value.function
        if isinstance(value, torch.Tensor):
            raise Unfit(f"{where} is a tensor; make it an argument")
        if isinstance(value, torch.nn.Module):
            raise Unfit(f"{where} is a module; make its tensors arguments")
        if isinstance(value, types.ModuleType):
            return self._module(value, where)
        if isinstance(value, functools.partial):
            return [
                "partial",
                *(self._value(part, where) for part in (value.func, value.args, value.keywords)),
            ]
        if isinstance(value, types.FunctionType) and not is_covered(str(value.__module__)):
            return ["function", self._number(value)]
        if isinstance(value, type) and not is_covered(str(value.__module__)):
            return self._class(value, where)
        if isinstance(value, (types.FunctionType, type, types.BuiltinFunctionType)):
            return self._named(value, where)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return [type(value).__name__, *(self._value(item, where) for item in value)]
        if is_covered(str(getattr(type(value), "__module__", ""))) and callable(value):
            return self._named(value, where)
        try:
            return self._writer.write(value, "", 0)
        except Unfit as error:
            raise Unfit(f"{where} is a {type(value).__name__}, which cannot be compared") from error

    def _module(self, value: types.ModuleType, where: str) -> Any:
        if value.__name__.partition(".")[0] in _CHANGING_MODULES:
            raise Unfit(f"{where} answers otherwise each time")
        if not is_covered(value.__name__):
            raise Unfit(f"{where} is a whole Python module")
        return ["module", value.__name__]

    def _named(self, value: Any, where: str) -> Any:
        module = str(getattr(value, "__module__", "") or "")
        owner = getattr(value, "__self__", None)
        if isinstance(owner, types.ModuleType):
            module = owner.__name__
        if module.partition(".")[0] in _CHANGING_MODULES or isinstance(
            value, type(functools.lru_cache(lambda: None))
        ):
            raise Unfit(f"{where} does not answer the same each time, or keeps what it answered")
        return ["named", module, str(getattr(value, "__qualname__", type(value).__qualname__))]

    def _class(self, value: type, where: str) -> Any:
        for base in value.__mro__:
            if is_covered(base.__module__):
                continue
            for name, attribute in vars(base).items():
                if _has_an_order(attribute):
                    raise Unfit(f"{where}.{name} is {_SET_ORDER}")
                function = getattr(attribute, "__func__", attribute)
                if isinstance(function, types.FunctionType):
                    self._number(function)
        return ["class", value.__module__, value.__qualname__, class_code(value)]


def _global(function: types.FunctionType, name: str, where: str) -> Any:
    value = function.__globals__.get(name, _MISSING)
    if value is _MISSING:
        value = getattr(builtins, name, _MISSING)
    if value is _MISSING:
        raise Unfit(f"{where}: {name} is not defined")
    if isinstance(value, types.ModuleType) and value.__name__ in _CHANGING_MODULES:
        raise Unfit(f"{where}: it uses {name}, which answers otherwise each time")
    return value


def _content(cell: Any, where: str, name: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise Unfit(f"{where}: {name} is not defined") from None
