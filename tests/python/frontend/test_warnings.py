"""What keeps calls from getting kernels is one warning, with its remedy."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import run_program
from eagercache.base import config, warn
from eagercache.modules.unknown_names import nearest
from eagercache.runtime import stores

pytestmark = pytest.mark.once

TWICE = """
import torch, eagercache
for _ in range(3):
    handle = eagercache.enable(["var.correction"], on_miss={on_miss!r})
x = torch.randn(64, 96)
report(same=torch.equal(torch.var(x, -1), torch.var(x, -1)), active=handle.active)
"""


def test_a_missing_compiler_is_said_once(cache: Path) -> None:
    done = run_program(TWICE.format(on_miss="background"), cache, EAGERCACHE_CXX="/nowhere/g++")
    assert done["active"] and done["same"]
    assert done["stderr"].count("'/nowhere/g++'") == 1
    assert "EAGERCACHE_CXX" in done["stderr"]


def test_who_asks_for_no_kernels_needs_no_compiler(cache: Path) -> None:
    done = run_program(TWICE.format(on_miss="native"), cache, EAGERCACHE_CXX="/nowhere/g++")
    assert done["active"] and "/nowhere" not in done["stderr"]


def test_a_store_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("this is no folder")
    done = run_program(TWICE.format(on_miss="background"), place)
    assert not done["active"] and done["same"]
    assert done["stderr"].count("no kernel store can be used") == 1
    assert "EAGERCACHE_DIR" in done["stderr"]


def test_a_store_that_can_only_be_read_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_warned", set())
    store = SimpleNamespace(read_only=True, root="/image/store")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            stores.say_what_hinders_compiling(
                store, config.read_settings({}), "compiler.version: gcc 12\n"
            )
    (only,) = caught
    assert "/image/store can only be read" in str(only.message)
    assert only.category is RuntimeWarning


NAMED = """
import torch, eagercache
class Block(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, x):
        return self.block(x)
eagercache.enable((), modules={names!r}, on_miss="native")
if {calls!r}:
    Outer()(torch.ones(3))
report()
"""


def test_a_name_that_no_class_has_is_said_once_with_the_nearest(cache: Path) -> None:
    known = ["Block", "__main__.Outer", "Linear"]  # of the last one no module is called
    names = [*known, "no.such.Class", "Blok", "package.Outer"]
    done = run_program(NAMED.format(names=names, calls=True), cache)
    said = [line for line in done["stderr"].splitlines() if "chose nothing" in line]
    assert len(said) == 3, done["stderr"]
    for line, name, remedy in zip(
        said,
        ["Blok", "no.such.Class", "package.Outer"],
        [
            "Did you mean __main__.Block?",
            "Classes whose modules the program called: __main__.Outer.",
            "Did you mean __main__.Outer?",
        ],
        strict=True,
    ):
        assert f"modules={name!r} chose nothing" in line and line.endswith(remedy), line


def test_a_process_that_calls_no_module_may_start_one_that_does(cache: Path) -> None:
    done = run_program(NAMED.format(names="no.such.Class", calls=False), cache)
    assert "no.such" not in done["stderr"]


def test_the_nearest_names_are_of_classes_that_are_called_so() -> None:
    known = ["a.b.Block", "c.Block", "c.Outer.Inner", "d.Attention"]
    assert nearest("z.Block", known) == ["a.b.Block", "c.Block"]
    assert nearest("Inner", known) == ["c.Outer.Inner"]
    assert nearest("Atention", known) == ["d.Attention"]
    assert nearest("no.such.Thing", known) == []
