"""Graphs, generated text and compiler commands. The compile as a whole is in test_worker.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagercache.base.toolchain import SCALAR, Compiler
from eagercache.calls.call import Call
from eagercache.worker.compat import aot_inductor
from eagercache.worker.inductor import bare, container
from eagercache.worker.inductor import commands as running
from eagercache.worker.inductor.call_graph import build_graph
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused, NoKernelOfItsOwn
from eagercache.worker.inductor.compile import find_cause
from eagercache.worker.inductor.container import BuildCommands
from eagercache.worker.inductor.generated_text import GeneratedText, admit, read_generated_text
from test_calls import NONE, boolean, describe, integer, integers, number, tensor

WRAPPER = """
#include <torch/csrc/inductor/aoti_include/cpu.h>
AOTInductorModel::AOTInductorModel(std::string device_str)
    : AOTInductorModelBase({inputs}, {outputs}, {constants}, device_str, std::move(dir), true) {{
    aoti_torch_cpu_outside();
}}
void AOTInductorModel::run_impl(AtenTensorHandle* input_handles) {{
    aoti_torch_empty_strided(1, sizes, strides, cached_torch_dtype_float32, &handle);
    aoti_torch_get_data_ptr(handle, &pointer);
    {body}
}}
"""
KERNEL = 'extern "C"  void  cpp_fused_abs_0(const float* in, float* out) {{ {body} }}'


def text(body: str = "", kernel: str | None = "", **counts: int) -> GeneratedText:
    numbers = {"inputs": 1, "outputs": 1, "constants": 0, **counts}
    code = KERNEL.format(body=kernel) if kernel is not None else ""
    return read_generated_text(WRAPPER.format(body=body, **numbers), code)


ABS = describe("abs", tensor((8,)))


def test_an_ordinary_kernel_is_admitted() -> None:
    facts = text()
    assert facts.kernels == ("cpp_fused_abs_0",)
    assert (facts.num_inputs, facts.num_outputs, facts.extern_calls) == (1, 1, ())
    admit(facts, Call(ABS))


@pytest.mark.parametrize(
    ("facts", "kind", "reason"),
    [
        (text("aoti_torch_cpu_mm_out(a, b, c);", kernel=None), NoKernelOfItsOwn, "no kernel"),
        (text("aoti_torch_call_dispatcher(a);", kernel=None), NoKernelOfItsOwn, "no kernel"),
        (text(kernel=None), CompileRefused, "without a kernel"),
        (text("aoti_torch_proxy_executor_call_function(a);"), CompileRefused, "proxy executor"),
        (text(constants=1), CompileRefused, "constants"),
        (text(kernel='AOTI_TORCH_CHECK(i < 3, "x");'), CompileRefused, "checks values"),
        (text(kernel="TORCH_CHECK_INDEX(i < 3);"), CompileRefused, "checks values"),
        (text(inputs=2), CompileRefused, "takes 2 tensors, the call has 1"),
    ],
)
def test_text_that_is_no_kernel_for_us_is_refused(
    facts: GeneratedText, kind: type[CompileRefused], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        admit(facts, Call(ABS))


@pytest.mark.once
def test_steps_that_may_be_rounded_otherwise_are_seen() -> None:
    one = "for (;;) { if (C10_LIKELY(a)) { auto tmp2 = tmp0 * tmp1; } if (C10_UNLIKELY(a)) { "
    assert not text(kernel=one + "auto tmp2 = decltype(tmp0)(tmp0 * tmp1); } }").approximates
    assert text(kernel=one + "auto tmp2 = tmp0 * tmp1; auto tmp4 = tmp2 + tmp3; } }").approximates
    assert text(kernel="auto tmp1 = std::atan2(tmp0, tmp0);").approximates
    assert text(kernel="auto tmp1 = tmp0.exp();").approximates
    assert not text(kernel="auto tmp1 = tmp0.abs(); auto tmp2 = std::max(tmp1, tmp0);").approximates


def test_a_kernel_beside_a_library_call_is_admitted_and_says_so() -> None:
    facts = text("aoti_torch_cpu_mm_out(a, b, c);")
    assert facts.extern_calls == ("aoti_torch_cpu_mm_out",)
    admit(facts, Call(ABS))


def test_text_that_is_not_understood_is_refused() -> None:
    with pytest.raises(CompileRefused, match="not understood"):
        read_generated_text("int main() {}", "")


def run_graph(description: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(native's results, the graph's) on the same data; numbers are 0-dim tensors in the graph."""
    call = Call(description)
    with call.state.applied():
        values = call.sample("normal", 4).values
        native = call.invoke(values)
        graph = build_graph(call, len(native))
        inputs = [
            value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=spec.dtype)
            for value, spec in zip(values, call.tensors, strict=True)
        ]
        return native, list(graph(*inputs))


# Where torch has this dtype, bfloat16 and a complex number make it, and native cannot multiply it.
HAS_BCOMPLEX32 = hasattr(torch, "bcomplex32")


def wrapped(dtype: str) -> dict[str, Any]:
    return tensor((), dtype=dtype, wrapped=True)


@pytest.mark.parametrize(
    "description",
    [
        ABS,
        describe("var.correction", tensor((4, 8)), integers(-1), NONE, boolean(True)),
        describe("native_layer_norm", tensor((4, 8)), integers(8), NONE, NONE, number(1e-5)),
        describe("max.dim", tensor((4, 8)), integer(1), boolean(False)),
        describe(
            "cat",
            {"kind": "tensor_list", "elements": [tensor((2, 3)), tensor((4, 3))]},
            integer(0),
        ),
        describe("split.Tensor", tensor((6, 2)), integer(2), integer(0)),
        *(
            describe("mul.Tensor", tensor(sizes, dtype=dtype), wrapped(number_dtype))
            for sizes in ((3,), ())
            for dtype in ("float32", "bfloat16", "int32", "bool", "complex64")
            for number_dtype in ("float64", "int64", "bool", "complex128")
            if (dtype, number_dtype) != ("bfloat16", "complex128") or not HAS_BCOMPLEX32
        ),
        describe(
            "mul.Tensor", tensor((3,), dtype="int32"), wrapped("float64"), default_dtype="float64"
        ),
    ],
)
def test_the_graph_computes_what_native_computes(description: dict[str, Any]) -> None:
    native, mine = run_graph(description)
    assert len(native) == len(mine)
    for expected, actual in zip(native, mine, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def compiler_script(folder: Path, body: str) -> Compiler:
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{body}\n')
    path.chmod(0o755)
    return Compiler(str(path), "gcc version 12.0.0", 12, "x86_64-linux-gnu", "none")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildCommands:
    """Commands on a compiler that only notes its arguments. Inductor itself is left alone."""
    for name in ("prepare_inductor", "set_vector_isa", "set_command_runner"):
        monkeypatch.setattr(container.aot_inductor, name, lambda *_: None)
    headers = tmp_path / "headers"
    headers.mkdir()
    return BuildCommands(compiler_script(tmp_path, ""), SCALAR, headers)


def run_build(commands: BuildCommands, tmp_path: Path, number: int, more: str = "") -> Path:
    """The commands of one kernel in Inductor's order; returns the build folder.

    ``more`` is behind the wrapper's text.
    """
    build = tmp_path / f"build{number}"
    build.mkdir()
    body = WRAPPER.format(body="", inputs=1, outputs=1, constants=0)
    (build / "a.wrapper.cpp").write_text(body + more)
    (build / "a.kernel.cpp").write_text(
        "#include <torch/csrc/inductor/cpp_prefix.h>\n" + KERNEL.format(body="")
    )
    compiler = commands.compiler.path
    commands.begin(build)
    for step in ("wrapper", "kernel"):
        source, target = f"{build}/a.{step}.cpp", f"{build}/a.{step}.o"
        commands.run(f"{compiler} {source} -march=native -c -o {target}", str(build))
    commands.run(f"{compiler} {build}/w.S -c -o {build}/w.o", str(build))
    commands.run(f"{compiler} {build}/a.wrapper.o {build}/w.o -shared -o {build}/a.so", str(build))
    commands.end()
    return build


# Says that it has started; the wrapper's and the kernel's end once both have.
MEETS = """
case "$*" in *.wrapper.cpp*) me=wrapper other=kernel;; *.kernel.cpp*) me=kernel other=wrapper;;
*) exit 0;; esac
: > {folder}/$me.started
while [ ! -e {folder}/$other.started ]; do sleep 0.01; done
"""


def test_wrapper_and_kernel_are_compiled_side_by_side(
    commands: BuildCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_script(tmp_path, MEETS.format(folder=tmp_path))
    # One after the other, the first would wait for the second until it is ended.
    monkeypatch.setattr(running, "COMMAND_TIMEOUT", 20.0)
    run_build(commands, tmp_path, 0)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4
    assert calls[3].split()[0].endswith("a.wrapper.o") and "-shared" in calls[3]
    assert all("-march=x86-64" in line and "native" not in line for line in calls)
    assert set(commands.seconds) == {"wrapper", "kernel", "weights", "link"}


def test_headers_are_precompiled_once_enough_kernels_were_built(
    commands: BuildCommands, tmp_path: Path
) -> None:
    compiler_script(tmp_path, MAKES_FILES)
    for index in range(container.KERNELS_BEFORE_HEADERS):
        run_build(commands, tmp_path, index)
    assert "-include" not in (tmp_path / "calls").read_text()
    run_build(commands, tmp_path, 10)
    lines = (tmp_path / "calls").read_text().splitlines()[-7:]
    assert sum("c++-header" in line for line in lines) == 2
    assert sum("-include" in line for line in lines) == 2
    assert lines[-1].rstrip().endswith("headers/wrapper/regex.o")
    header = (tmp_path / "headers" / "wrapper" / "wrapper.h").read_text()
    assert header.startswith("#include <torch/csrc/inductor/aoti_include/cpu.h>\n")
    assert "extern template class std::basic_regex<char>;" in header


MAKES_FILES = 'while [ $# -gt 0 ]; do [ "$1" != -o ] || : > "$2"; shift; done'
NO_HEADER = 'case "$*" in *c++-header*) exit 1;; esac\n' + MAKES_FILES


@pytest.mark.parametrize(("body", "included"), [(MAKES_FILES, 2), (NO_HEADER, 0)])
def test_bare_kernels_share_a_precompiled_header_and_do_without_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, included: int
) -> None:
    compiler = compiler_script(tmp_path, body)
    monkeypatch.setattr(bare.aot_inductor, "kernel_compile_command", lambda path: [path, "-O3"])
    private = tmp_path / "private"
    private.mkdir()
    builder = bare.BareBuilder(compiler, SCALAR, private)
    for unit in range(bare.UNITS_BEFORE_HEADER + 2):
        folder = tmp_path / f"build{unit}"
        folder.mkdir()
        plan: Any = SimpleNamespace(entry="kernel", source="void kernel() {}")
        assert builder.build([plan], folder) == folder / "kernels.so"
        assert (folder / "kernels.so").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("c++-header" in call for call in calls) == 1
    assert sum(f"-include {private}/bare/bare.h" in call for call in calls) == included


# As MAKES_FILES, and the list of what a header is made of.
MAKES_HEADERS = """
case "$*" in *c++-header*)
  for w in "$@"; do case $w in *.d) printf 'a: \\\\\\n %s\\n' {source} > $w;; esac; done;;
esac
{makes}"""


class Builds:
    """Builders of one compiler, that share headers in one store; and what the compiler was told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.made = folder, 0
        self.source = folder / "cpp_prefix.h"
        self.source.write_text("// one")
        self.store = folder / "store"
        self.store.mkdir(mode=0o700)
        body = MAKES_HEADERS.format(source=self.source, makes=MAKES_FILES)
        self.compiler = compiler_script(folder, body)
        monkeypatch.setattr(bare.aot_inductor, "kernel_compile_command", lambda path: [path, "-O3"])

    def builder(self, compiler: Compiler | None = None) -> bare.BareBuilder:
        self.made += 1
        private = self.folder / f"private{self.made}"
        private.mkdir()
        return bare.BareBuilder(compiler or self.compiler, SCALAR, private, self.store)

    def build(self, builder: bare.BareBuilder) -> list[str]:
        """The commands of one unit."""
        before = self.calls()
        self.made += 1
        folder = self.folder / f"build{self.made}"
        folder.mkdir()
        plan: Any = SimpleNamespace(entry="kernel", source="void kernel() {}")
        assert builder.build([plan], folder).exists()
        return self.calls()[len(before) :]

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def fill(self) -> Path:
        """Has a worker leave its header; the header."""
        first = self.builder()
        for _ in range(bare.UNITS_BEFORE_HEADER + 1):
            self.build(first)
        (header,) = self.store.glob("HEADERS/*/bare.h")
        return header


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    return Builds(tmp_path, monkeypatch)


def test_a_worker_takes_the_header_that_another_one_left(builds: Builds) -> None:
    header = builds.fill()
    assert not list(builds.folder.glob("private*/bare"))  # moved, not copied: it is large
    told = builds.build(builds.builder())
    assert [f"-include {header}" in line for line in told] == [True, False]  # compile, link


def test_a_header_is_made_again_when_what_it_was_made_of_has_changed(builds: Builds) -> None:
    header = builds.fill()
    builds.source.write_text("// another one")
    other = builds.builder()
    for _ in range(bare.UNITS_BEFORE_HEADER):
        assert not any("-include" in line for line in builds.build(other))
    told = builds.build(other)
    assert sum("c++-header" in line for line in told) == 1
    assert any(f"-include {header}" in line for line in told)
    assert any("-include" in line for line in builds.build(builds.builder()))


def test_another_compiler_has_a_header_of_its_own(builds: Builds) -> None:
    builds.fill()
    newer = replace(builds.compiler, version="gcc version 13.0.0")
    assert not any("-include" in line for line in builds.build(builds.builder(newer)))


def test_a_header_that_others_may_have_written_is_not_used(builds: Builds) -> None:
    builds.fill()
    builds.store.chmod(0o777)
    assert not any("-include" in line for line in builds.build(builds.builder()))


def make_writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 12345, -1)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [make_writable, give_away, replace_by_link])
@pytest.mark.parametrize(
    "place", ["HEADERS", "HEADERS/*[!k]", "HEADERS/*/*.gch", "HEADERS/*/sources"]
)
def test_a_header_that_was_planted_while_others_could_write_is_not_used(
    builds: Builds, spoil: Callable[[Path], None], place: str
) -> None:
    builds.fill()
    assert any("-include" in line for line in builds.build(builds.builder()))
    (path,) = builds.store.glob(place)
    spoil(path)
    assert not any("-include" in line for line in builds.build(builds.builder()))


def test_a_header_of_other_bytes_than_were_made_is_not_used(builds: Builds) -> None:
    header = builds.fill()
    made = header.with_suffix(".h.gch")
    made.write_bytes(b"x" + made.read_bytes()[1:])
    assert not any("-include" in line for line in builds.build(builds.builder()))


def test_a_header_that_does_not_work_is_done_without_and_removed(builds: Builds) -> None:
    header = builds.fill()
    body = 'case "$*" in *-include*) exit 1;; esac\n' + MAKES_FILES
    compiler_script(builds.folder, body)
    told = builds.build(builds.builder())
    assert [("-include" in line) for line in told[:2]] == [True, False]
    assert not header.exists()


@pytest.mark.parametrize(
    ("body", "reason", "transient"),
    [
        ("echo 'a.cpp:1: error: no such thing' >&2; exit 1", "no such thing", False),
        ("echo 'No space left on device' >&2; exit 1", "exited with 1", True),
        ("kill -KILL $$", "exited with -9", True),
    ],
)
def test_a_failed_command_says_why_and_whether_to_try_again(
    commands: BuildCommands, tmp_path: Path, body: str, reason: str, transient: bool
) -> None:
    compiler_script(tmp_path, body)
    with pytest.raises(CompileFailed, match=reason) as failure:
        run_build(commands, tmp_path, 0)
    assert failure.value.transient == transient
    commands.abandon()


def test_a_command_that_hangs_is_ended(
    commands: BuildCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_script(tmp_path, "exec sleep 60")
    monkeypatch.setattr(running, "COMMAND_TIMEOUT", 0.3)
    with pytest.raises(CompileFailed, match="took over") as failure:
        run_build(commands, tmp_path, 0)
    assert failure.value.transient
    commands.abandon()


def test_refusals_are_found_inside_the_exceptions_around_them() -> None:
    inner, outer = NoKernelOfItsOwn("inner"), RuntimeError("outer")
    outer.__cause__ = ValueError("between")
    outer.__cause__.__context__ = inner
    assert find_cause(outer) is inner
    assert find_cause(RuntimeError("alone")) is None


def test_what_fails_in_calls_of_native_is_looked_at() -> None:
    calls = [
        "aoti_torch_cpu_scatter_src_out(a, b);",
        "aoti_torch_index_put_out(a, b);",
        "aoti_torch_proxy_executor_call_function(p);",
    ]
    rest = "    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_scatter_src_out(a, b));\n    plain();"
    checked = aot_inductor.checked_calls("\n".join([*(f"    {call}" for call in calls), rest]))
    lines = [f"AOTI_TORCH_ERROR_CODE_CHECK({call.removesuffix(';')});" for call in calls]
    assert checked == "\n".join([*lines, rest])
    with pytest.raises(ValueError, match="not one line"):
        aot_inductor.checked_calls("aoti_torch_cpu_scatter_src_out(a,\n b);")
