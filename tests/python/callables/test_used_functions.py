"""What finds the code that a forward ran again, by name, and notices that it is another one."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import module_world_parts
import module_zoo
import pytest
import torch
from eagercache.callables.module_identity import Unfit
from eagercache.callables.used_functions import (
    CodeIndex,
    FunctionRecorder,
    changed_function,
)
from eagercache.calls.code_digest import code_digest
from eagercache.calls.trace_rows import rows_in, rows_text

CODE = """
import settings

SCALE = 2.0
TABLE = {"shift": [0.5]}

class Limits:
    low = -1.0

class Options:
    def __init__(self):
        self.high = 4.0

options = Options()

def add(amount):
    def inner(x):
        return x + amount
    return inner

more = add(0.25)

def helper(x, power=2):
    x = x ** power * SCALE + TABLE["shift"][0]
    return more(min(max(x, Limits.low), options.high)) * settings.gain

def outer(function):
    def wrapper(x):
        return function(x) + 1
    return wrapper

@outer
def wrapped(x):
    return helper(x)
"""


def _python_module(code: str) -> types.ModuleType:
    module = types.ModuleType("recorded")
    exec(code, vars(module))
    return module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* SCALE", "+ SCALE"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("[0.5]", "[0.75]"),
        ("low = -1.0", "low = -2.0"),
        ("high = 4.0", "high = 5.0"),
        ("add(0.25)", "add(0.5)"),
        ("power=2", "power=3"),
        ("import settings", "import other_settings as settings"),
        ("function(x) + 1", "function(x)"),
    ],
)
def test_a_change_of_code_that_ran_is_found(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    block = module_zoo.Block()
    for name, gain in {"settings": 1.0, "other_settings": 2.0}.items():
        settings = types.ModuleType(name)
        settings.gain = gain  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, settings)
    first = _python_module(CODE)
    with FunctionRecorder() as recorder:
        first.wrapped(1.0)
    rows = [function.to_row() for function in recorder.used(block) if function.module == "recorded"]
    assert len(rows) == 4  # helper, what add gives, wrapped, and the wrapper around it
    monkeypatch.setitem(sys.modules, "recorded", _python_module(CODE))
    assert changed_function(rows, block) is None
    monkeypatch.setitem(sys.modules, "recorded", _python_module(CODE.replace(old, new)))
    assert changed_function(rows, block) is not None
    monkeypatch.delitem(sys.modules, "recorded")
    assert changed_function(rows, block) is not None


@pytest.mark.parametrize("call", ["os.environ.get", "os.getenv", "getenv", "environ.get"])
def test_another_value_of_an_environment_variable_that_is_asked_for_is_found(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    python_module = _python_module(
        "import os\nfrom os import environ, getenv\n"
        f'def gain(x):\n    return x * float({call}("GAIN_OF_THE_TEST", "1"))\n'
    )
    monkeypatch.setitem(sys.modules, "recorded", python_module)
    with FunctionRecorder() as recorder:
        python_module.gain(1.0)
    block = module_zoo.Block()
    rows = [function.to_row() for function in recorder.used(block) if function.module == "recorded"]
    assert changed_function(rows, block) is None
    monkeypatch.setenv("GAIN_OF_THE_TEST", "2")
    assert changed_function(rows, block) == "recorded.gain"


def test_nested_functions_and_methods_have_names() -> None:
    index = CodeIndex(vars(module_zoo))
    forward = module_zoo.Block.forward.__code__
    assert index.paths_of(forward) == ["Block.forward"]
    assert index.find("Block.forward") is not None
    assert index.find("Block.absent") is None
    # All of one code, since each may hold other values.
    kinds = {"Made": module_world_parts.kind_of(1.0), "Another": module_world_parts.kind_of(2.0)}
    made = CodeIndex({**vars(module_world_parts), **kinds})
    paths = made.paths_of(kinds["Made"].get.__code__)
    assert {"Made.get", "Another.get"} <= set(paths)
    assert made.find("Made.get") != made.find("Another.get")


def test_rows_of_a_deep_model_fit_into_a_manifest() -> None:
    rows = [
        ["", f'[["self",""],["attr","layers"],["item","{layer}"],["attr","a{read}"]]', "{}", "1"]
        for layer in range(96)
        for read in range(30)
    ]
    text = rows_text(rows)
    assert len(text) < 60_000
    assert rows_in(text) == rows
    assert rows_in(rows_text(rows[:3])) == rows[:3]


@pytest.mark.parametrize("text", ["zlib:!", "zlib:AAAA", "[1]", "{}", '[["a","b","c"]]', ""])
def test_what_is_no_row_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        rows_in(text)


def test_rows_that_end_early_are_a_value_error() -> None:
    text = rows_text([["module", "path", str(number), "values"] for number in range(500)])
    with pytest.raises(ValueError):
        rows_in(text[:-40])


@contextlib.contextmanager
def _block() -> Iterator[None]:
    """Somewhere."""
    yield


def test_context_managers_that_are_functions_may_be_entered_and_not_be_asked() -> None:
    def enters() -> None:
        with _block():
            pass

    def asks() -> None:
        assert _block.__doc__

    for called, effect in ((enters, False), (asks, True)):
        with FunctionRecorder() as recorder:
            called()
        with pytest.raises(Unfit, match="documentation") if effect else contextlib.nullcontext():
            recorder.check_effects()


def test_code_that_was_executed_outside_of_any_module_is_not_found_again() -> None:
    namespace: dict[str, Any] = {}
    exec("def made(x):\n    return x + 1\n", namespace)
    with FunctionRecorder() as recorder:
        namespace["made"](1)
    with pytest.raises(Unfit, match="made, which was executed outside of any module"):
        recorder.used(torch.nn.Identity())


def test_code_that_differs_in_where_a_try_begins_or_how_it_may_be_called_is_other_code() -> None:
    def names(value: float, more: float = 1.0) -> float:
        return value * more

    def places(value: float, more: float = 1.0, /) -> float:
        return value * more

    both, apart = module_world_parts.split.__code__, module_world_parts.split_apart.__code__
    assert code_digest(both) != code_digest(apart)
    assert code_digest(names.__code__) != code_digest(places.__code__)
    assert code_digest(names.__code__) == code_digest(names.__code__.replace(co_firstlineno=7))


@pytest.mark.parametrize("lines", [3, 300])
def test_code_that_makes_a_class_is_the_same_code_further_down(lines: int) -> None:
    def made(text: str) -> types.CodeType:
        return next(c for c in compile(text, "", "exec").co_consts if isinstance(c, types.CodeType))

    text = (
        "def make():\n  class Kind:\n    one = 1\n    two = 2.5\n    def at(self): return self.one"
    )
    assert code_digest(made(text)) == code_digest(made("\n" * lines + text))
    for old, new in (("2.5", "2.0"), ("= 1", "= 4"), ("self.one", "self.two")):
        assert code_digest(made(text)) != code_digest(made(text.replace(old, new))), old


# As einops has it: what it knows of a type it has met, and what it asks where it has not.
REMEMBERS = """
table = {}

class Backend:
    def fits(self, x):
        return True

def get_backend(x):
    if type(x) not in table:
        table[type(x)] = max([Backend()], key=lambda backend: backend.fits(x))
    return table[type(x)]
"""


def test_what_is_remembered_of_types_that_were_met_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = types.ModuleType("einops._backends")
    exec(REMEMBERS, vars(backends))
    recorded = _python_module("def twice(x):\n    return x * 2\n")
    for module in (backends, recorded):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with FunctionRecorder() as recorder:
        backends.get_backend(1.0)
        recorded.twice(1.0)
    rows = [function.to_row() for function in recorder.used(torch.nn.Identity())]
    named = {row[0] for row in rows}
    assert "recorded" in named and "einops._backends" not in named
    backends.get_backend("")
    assert changed_function(rows, torch.nn.Identity()) is None
