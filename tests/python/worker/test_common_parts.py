"""What containers share is compiled apart from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagercache.base import environment
from eagercache.base.load import core
from eagercache.base.toolchain import find_compiler, pick_isa
from eagercache.worker.compat import aot_inductor
from eagercache.worker.inductor import common_parts, container
from eagercache.worker.inductor.compile import Tools
from test_compile import MAKES_FILES, commands, compiler_script, run_build

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
