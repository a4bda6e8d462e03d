"""The environment key: complete, canonical, quick, and free of what must not be in it."""

from __future__ import annotations

import dataclasses
import getpass
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import clean_environment
from eagercache.base import environment, toolchain
from eagercache.base.environment import FIELDS, VARIABLES, Context


@pytest.fixture(scope="module")
def context() -> Context:
    return dataclasses.replace(environment.read_context(), environ={})


def test_every_field_is_one_line_in_the_order_of_the_list(context: Context) -> None:
    lines = environment.text_of(context).splitlines()
    assert [line.split(": ", 1)[0] for line in lines] == [field.name for field in FIELDS]
    assert all(line.split(": ", 1)[1] for line in lines)
    assert len({field.name for field in FIELDS}) == len(FIELDS)


@pytest.mark.parametrize("index", range(len(FIELDS)), ids=[field.name for field in FIELDS])
def test_a_changed_field_alone_changes_the_key_and_is_named(
    context: Context, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment.text_of(context)
    changed = dataclasses.replace(FIELDS[index], read=lambda _: "something else")
    monkeypatch.setattr(environment, "FIELDS", (*FIELDS[:index], changed, *FIELDS[index + 1 :]))
    after = environment.text_of(context)
    assert environment.diff(before, after) == [FIELDS[index].name]


def digest_below(package: Path) -> str:
    return environment.hash_sources(package, environment.source_files(package))


@pytest.mark.parametrize("folder", ["base", "worker", "worker/inductor", "worker/new/deeper"])
def test_a_file_in_a_new_folder_changes_the_key(folder: str, tmp_path: Path) -> None:
    before = digest_below(tmp_path)
    added = tmp_path / folder / "module.py"
    added.parent.mkdir(parents=True)
    added.write_text("1")
    with_it = digest_below(tmp_path)
    added.write_text("2")
    assert len({before, with_it, digest_below(tmp_path)}) == 3
    added.rename(added.with_name("moved.py"))
    assert digest_below(tmp_path) not in (before, with_it)


def changed_compiler(name: str) -> Callable[[Context], Context]:
    def change(context: Context) -> Context:
        assert context.compiler is not None
        changed: Any = {name: "another"}
        return dataclasses.replace(
            context, compiler=dataclasses.replace(context.compiler, **changed)
        )

    return change


def other_isa(context: Context) -> Context:
    isa = toolchain.AVX2 if context.isa == toolchain.AVX512 else toolchain.AVX512
    return dataclasses.replace(context, isa=isa)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (changed_compiler("version"), ["compiler.version"]),
        (changed_compiler("target"), ["compiler.target"]),
        (changed_compiler("configuration"), ["compiler.configuration"]),
        (lambda c: dataclasses.replace(c, binutils={**c.binutils, "ld": "x"}), ["linker"]),
        (lambda c: dataclasses.replace(c, binutils={**c.binutils, "as": "x"}), ["assembler"]),
        (other_isa, ["compiler.flags", "cpu.features", "cpu.isa"]),
        *(
            (lambda c, n=name: dataclasses.replace(c, environ={n: "1"}), [f"variable.{name}"])
            for name in VARIABLES
        ),
    ],
)
def test_what_a_field_is_read_from_reaches_the_key(
    context: Context, change: Callable[[Context], Context], fields: list[str]
) -> None:
    before, after = environment.text_of(context), environment.text_of(change(context))
    assert environment.diff(before, after) == fields


def test_the_compilers_path_is_not_part_of_the_key(context: Context) -> None:
    moved = changed_compiler("path")(context)
    assert environment.text_of(moved) == environment.text_of(context)


def test_a_host_without_compiler_has_a_key_of_its_own(context: Context) -> None:
    without = environment.text_of(dataclasses.replace(context, compiler=None))
    assert environment.parse(without)["compiler.version"] == "none"
    assert environment.text_of(context) != without


def test_no_value_can_forge_another_line(context: Context) -> None:
    forged = dataclasses.replace(context, environ={VARIABLES[0]: "1\nformat: 9"})
    text = environment.text_of(forged)
    assert len(text.splitlines()) == len(FIELDS)
    assert environment.parse(text)["format"] == str(environment.FORMAT)


def test_a_field_that_one_text_lacks_differs() -> None:
    assert environment.diff("a: 1\nb: 2\n", "a: 1\n") == ["b"]


# The modules that must not have been imported, then the text. bench/store/store.py has the time
# that it takes.
PROGRAM = """
import sys
import torch
from eagercache.base import environment
text = environment.environment_text()
print([name for name in sys.modules if name.startswith(("torch._inductor", "triton"))])
print(text, end="")
"""


def run_program(**variables: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        check=True,
    )
    modules, text = done.stdout.split("\n", 1)
    return modules, text


def test_it_imports_no_inductor_and_is_the_same_in_every_process() -> None:
    results = [run_program(PYTHONHASHSEED=seed, TZ=zone) for seed, zone in (("1", "A"), ("2", "B"))]
    assert results[0][1] == results[1][1]
    assert len(results[0][1].splitlines()) == len(FIELDS)
    assert [modules for modules, _ in results] == ["[]", "[]"]


def test_the_text_names_no_path_user_or_host(context: Context) -> None:
    text = environment.text_of(context)
    assert str(Path.home()) not in text
    assert "/usr/" not in text and sys.prefix not in text
    # A short name could be part of a word or a hash.
    for name in (getpass.getuser(), socket.gethostname()):
        values = environment.parse(text).values()
        assert not any(name == word for value in values for word in value.split())
