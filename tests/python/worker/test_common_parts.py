"""What containers share is compiled apart from them."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch
from eagercache.base import environment
from eagercache.base.load import core
from eagercache.base.toolchain import find_compiler, pick_isa
from eagercache.worker.compat import aot_inductor
from eagercache.worker.inductor import common_parts, container
from eagercache.worker.inductor.compile import Tools
from test_compile import MAKES_FILES, MAKES_HEADERS, SCALAR, commands, compiler_script, run_build

__all__ = ["commands"]  # a fixture

CALLED = "AOTInductorModelContainerRun("


def test_the_functions_that_call_a_container_are_left_out_of_its_text() -> None:
    interface = aot_inductor.container_interface().read_text().rstrip()
    rest = common_parts.without_interface(f"before\n{interface}\nbehind\n")
    assert rest is not None
    assert CALLED in interface and CALLED not in rest
    assert rest.startswith("before\n#include <") and rest.endswith(";\nbehind\n")
    assert "\nextern template class " in rest
    assert common_parts.without_interface("before\nbehind\n") is None


def test_what_inductor_writes_has_them(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x.sin() + 1,))
    wrappers: list[str] = []
    tools = Tools(find_compiler(), pick_isa(core.host_cpu_features()), None)
    tools.read_texts(graph, (torch.ones(8),), tmp_path, lambda text, _: wrappers.append(text))
    rest = [common_parts.without_interface(text) for text in wrappers]
    assert len(rest) == 1 and rest[0] is not None and CALLED not in rest[0]


WRONG = "unmatched dtype"


def test_checks_of_tensors_are_left_out_unless_a_variable_asks_for_them(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(lambda x, y: (x.sin() + y,))
    found: list[str] = []
    tools = Tools(find_compiler(), pick_isa(core.host_cpu_features()), None)
    examples = (torch.ones(8), torch.ones(8))
    tools.read_texts(graph, examples, tmp_path, lambda text, _: found.append(text))
    (text,) = found
    less = common_parts.without_checks(text, {})
    left_out = set(text.splitlines()) - set(less.splitlines())
    assert text.count(WRONG) == 2 and WRONG not in less
    assert all(line.startswith(" ") for line in left_out), left_out
    assert text.partition("::run_impl(")[2] == less.partition("::run_impl(")[2] != ""
    assert text.count("check_input_") == less.count("check_input_") == 4
    assert common_parts.without_checks(text, {common_parts.CHECKS_VARIABLE: "1"}) == text
    assert common_parts.CHECKS_VARIABLE in environment.VARIABLES  # it has kernels of its own


@pytest.mark.parametrize("compiles", [True, False])
def test_they_are_compiled_once_or_with_every_container_where_they_cannot_stand_alone(
    commands: container.BuildCommands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiles: bool,
) -> None:
    fails = "" if compiles else 'case "$*" in *interface.cpp*) exit 1;; esac\n'
    compiler_script(tmp_path, fails + MAKES_FILES)
    monkeypatch.setattr(container, "KERNELS_BEFORE_HEADERS", 0)
    interface = aot_inductor.container_interface().read_text()
    for number in range(2):
        wrapper = run_build(commands, tmp_path, number, interface) / "a.wrapper.cpp"
        assert (CALLED in wrapper.read_text()) != compiles
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("interface.cpp" in line for line in calls) == 1
    links = [line for line in calls if "-shared" in line]
    assert [("interface.o" in line) for line in links] == [compiles] * 2


class Workers:
    """Processes with one compiler, which share what is precompiled in one store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.builds = folder, 0
        self.source = folder / "cpu.h"
        self.source.write_text("// one")
        self.store = folder / "store"
        self.store.mkdir(mode=0o700)
        self.interface = aot_inductor.container_interface().read_text()
        self.told(MAKES_HEADERS.format(source=self.source, makes=MAKES_FILES))

    def told(self, body: str) -> None:
        """The compiler is that script from now on."""
        self.compiler = compiler_script(self.folder, body)

    def build(self, worker: container.BuildCommands | None = None) -> list[str]:
        """The compiler's commands for a container of a new worker."""
        self.builds += 1
        if worker is None:
            headers = self.folder / f"private{self.builds}"
            headers.mkdir()
            worker = container.BuildCommands(self.compiler, SCALAR, headers, self.store)
        calls = self.folder / "calls"
        before = len(calls.read_text().splitlines()) if calls.exists() else 0
        self.wrapper = run_build(worker, self.folder, self.builds, self.interface) / "a.wrapper.cpp"
        return calls.read_text().splitlines()[before:]


@pytest.fixture
def workers(
    commands: container.BuildCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Workers:
    found = Workers(tmp_path)
    monkeypatch.setattr(container, "KERNELS_BEFORE_HEADERS", 0)
    first = found.build()
    assert sum("c++-header" in line for line in first) == 2
    monkeypatch.setattr(container, "KERNELS_BEFORE_HEADERS", 2)
    return found


def including(told: list[str]) -> int:
    return sum("-include" in line for line in told)


def test_a_worker_takes_what_another_one_precompiled(workers: Workers) -> None:
    told = workers.build()
    assert len(told) == 4 and including(told) == 2, told
    (wrapper,) = workers.store.glob("HEADERS/*/wrapper.h")
    for name in ("regex.o", "interface.o"):
        assert str(wrapper.with_name(name)) in told[-1]
    assert CALLED not in workers.wrapper.read_text()
    there = {path.name for path in wrapper.parent.iterdir()}
    assert there == {"wrapper.h", "wrapper.h.gch", "regex.o", "interface.o", "sources"}


def test_of_workers_that_begin_together_one_precompiles(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "KERNELS_BEFORE_HEADERS", 0)
    workers.source.write_text("// another one")
    locks = [path.open() for path in workers.store.glob("HEADERS/*.lock")]
    assert len(locks) == 2
    for lock in locks:  # as while another worker is at it
        fcntl.flock(lock, fcntl.LOCK_EX)
    told = workers.build()
    assert len(told) == 4 and including(told) == 0, told
    for lock in locks:
        lock.close()
    assert sum("c++-header" in line for line in workers.build()) == 2
    assert including(workers.build()) == 2


@pytest.mark.parametrize("spoilt", ["source", "object", "another object", "folder"])
def test_what_was_changed_meanwhile_is_not_taken(workers: Workers, spoilt: str) -> None:
    (wrapper,) = workers.store.glob("HEADERS/*/wrapper.h")
    if spoilt == "source":
        workers.source.write_text("// another one")
    elif spoilt == "object":
        wrapper.with_name("regex.o").write_bytes(b"x")
    elif spoilt == "another object":
        wrapper.with_name("interface2.o").write_bytes(b"")
    else:
        wrapper.parent.chmod(0o770)
    told = workers.build()
    assert including(told) == (0 if spoilt == "source" else 1), told
    assert "regex.o" not in told[-1] and CALLED in workers.wrapper.read_text()


def test_what_does_not_work_is_done_without_and_removed(workers: Workers) -> None:
    workers.told('case "$*" in *-include*wrapper.h*) exit 1;; esac\n' + MAKES_FILES)
    told = workers.build()
    assert including(told) == 2 and len(told) == 5, told
    assert "regex.o" not in told[-1] and CALLED in workers.wrapper.read_text()
    assert not list(workers.store.glob("HEADERS/*/wrapper.h"))
    assert list(workers.store.glob("HEADERS/*/kernel.h"))
