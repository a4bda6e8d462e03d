"""One operator call made into a shared object.

The graph of one node is built by hand, Inductor lowers it, and AOTInductor's commands run through
`BuildCommands`, which puts our flags in, runs the two compiler calls side by side, and reads the
generated text before anything is compiled: a graph that is no kernel of its own is refused there,
at no cost.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx

from . import _compat
from .calls import Call, TensorSpec
from .toolchain import Compiler, Isa, rewrite_command

# A compiler run that takes longer than this is killed.
COMMAND_TIMEOUT = 120.0  # seconds

# Kernels built before the precompiled headers and the regex object are made. Together those cost
# what they save on about three kernels, and the first kernel of a process must be quick.
KERNELS_BEFORE_HEADERS = 2


class CompileRefused(Exception):
    """The call is left to native, for a reason that will be the same next time."""


class NoKernelOfItsOwn(CompileRefused):
    """Inductor answers the call with the very operator that native runs."""


class CompileFailed(Exception):
    """The compile went wrong. ``transient`` when the machine, not the call, was the reason."""

    def __init__(self, reason: str, *, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


@dataclass(frozen=True)
class GeneratedText:
    """What the generated text says about a kernel."""

    num_inputs: int
    num_outputs: int
    num_constants: int
    kernels: tuple[str, ...]  # functions that Inductor generated
    extern_calls: tuple[str, ...]  # operators that it calls back into
    uses_proxy_executor: bool
    checks_values: bool
    reduces: bool  # some kernel accumulates over elements


@dataclass(frozen=True)
class CompiledKernel:
    """A finished container on disk, in the directory given to `compile_call`."""

    path: Path
    text: GeneratedText
    seconds: dict[str, float] = field(default_factory=dict)  # of CPU time by step; "wall" for all


# Functions of AOTInductor's C interface that are not operators.
_RUNTIME_CALL = re.compile(
    r"aoti_torch_(empty_strided\w*|create_tensor_from_blob\w*|delete\w*|get_\w+|new_\w+|clone\w*"
    r"|dtype_\w+|device_type_\w+|layout_\w+|memory_format_\w+|item_\w+|assign_tensors\w*|zero_"
    r"|check\w*|grad_mode_\w+|warn|_?reinterpret_tensor\w*|as_strided|copy_)$"
)
_EXTERN_CALL = re.compile(r"\b(aoti_torch_\w+)\s*\(")
_KERNEL = re.compile(r'extern\s+"C"\s+(?:\w+\s+)*?void\s+(\w+)\s*\(')
_ACCUMULATOR = re.compile(r"\btmp_acc\d")
_VALUE_CHECK = re.compile(r"\b(AOTI_TORCH_CHECK|TORCH_CHECK\w*|AOTI_RUNTIME_CHECK)\s*\(")


def read_generated_text(wrapper: str, kernel: str) -> GeneratedText:
    """Facts of the two generated files. Raises CompileRefused when they are not understood."""
    try:
        num_inputs, num_outputs, num_constants = _compat.graph_fields(wrapper)
        body = wrapper[wrapper.index("::run_impl(") :]
    except ValueError as error:
        raise CompileRefused(f"generated text not understood: {error}") from error
    calls = sorted({name for name in _EXTERN_CALL.findall(body) if not _RUNTIME_CALL.match(name)})
    proxy = [name for name in calls if "proxy_executor" in name or "call_dispatcher" in name]
    return GeneratedText(
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_constants=num_constants,
        kernels=tuple(_KERNEL.findall(kernel)),
        extern_calls=tuple(name for name in calls if name not in proxy),
        uses_proxy_executor=bool(proxy),
        checks_values=_VALUE_CHECK.search(kernel) is not None
        or _VALUE_CHECK.search(body) is not None,
        reduces=_ACCUMULATOR.search(kernel) is not None,
    )


def _admit(text: GeneratedText, call: Call) -> None:
    if not text.kernels:
        if text.extern_calls or text.uses_proxy_executor:
            raise NoKernelOfItsOwn("no kernel of its own")
        raise CompileRefused("nothing was generated: the result is made without a kernel")
    if text.uses_proxy_executor:
        raise CompileRefused("the generated code needs the proxy executor")
    if text.num_constants:
        raise CompileRefused("the generated code holds constants")
    if text.checks_values:
        raise CompileRefused("generated code checks values")
    if text.num_inputs != len(call.tensors):
        raise CompileRefused(
            f"the kernel takes {text.num_inputs} tensors, the call has {len(call.tensors)}"
        )


def build_graph(call: Call, num_returns: int) -> torch.fx.GraphModule:
    """The graph of one node: a placeholder per tensor, everything else baked in."""
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"arg{i}") for i in range(len(call.tensors))]
    values = [
        _promote_as_number(graph, call, node, spec)
        for node, spec in zip(placeholders, call.tensors, strict=True)
    ]
    args, kwargs = call.bind(values)
    node = graph.call_function(call.op, tuple(args), kwargs)
    returns = call.op._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        graph.output((node,))
    else:
        parts = [graph.call_function(operator.getitem, (node, i)) for i in range(num_returns)]
        graph.output(tuple(parts))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def _promote_as_number(
    graph: torch.fx.Graph, call: Call, node: torch.fx.Node, spec: TensorSpec
) -> torch.fx.Node:
    """``node`` in a dtype that promotes as native lets a Python number promote.

    In the graph it is an ordinary 0-dim tensor, which outranks what a number does not: 0-dim
    tensors of its category, and the default dtype where no other argument is of its category.
    """
    if not spec.wrapped:
        return node
    category = _category(spec.dtype)
    others = [other for other in call.tensors if not other.wrapped]
    top = max((_category(other.dtype) for other in others), default=-1)
    peers = [other for other in others if _category(other.dtype) == max(top, category)]
    if any(other.sizes for other in peers):
        return node
    if top >= category:
        dtype = functools.reduce(torch.promote_types, [other.dtype for other in peers])
        if top > category:
            # Only a complex peer is raised by a float's width; integers and booleans have none.
            dtype = dtype.to_real() if category == 2 else spec.dtype
    elif category == 2:
        dtype = call.state.default_dtype
    elif category == 3:
        dtype = call.state.default_dtype.to_complex()
    else:
        return node
    if dtype == spec.dtype:
        return node
    return graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})


class BuildCommands:
    """Runs AOTInductor's compiler commands for one worker process.

    Not thread-safe: one compile at a time. ``headers`` is a private directory that lives as long as
    the object; precompiled headers go there once enough kernels have been built to pay for them.
    """

    def __init__(self, compiler: Compiler, isa: Isa, headers: Path | None) -> None:
        self._compiler = compiler
        self._isa = isa
        self._headers = headers
        self._finished_kernels = 0
        self._call: Call | None = None
        self._directory = Path()
        self._running: list[_Command] = []
        self._text: GeneratedText | None = None
        self.seconds: dict[str, float] = {}
        _compat.prepare_inductor()
        _compat.set_vector_isa(isa)
        _compat.set_command_runner(self.run)

    @property
    def compiler(self) -> Compiler:
        """The compiler that every command is run with."""
        return self._compiler

    def begin(self, call: Call, directory: Path) -> None:
        """Commands until `end` or `abandon` belong to ``call`` and work in ``directory``."""
        self._call = call
        self._directory = directory
        self._text = None
        self._uses_regex_object = False
        self.seconds = {}

    def end(self) -> GeneratedText:
        """The facts of the text that was compiled. Raises CompileRefused when nothing was."""
        self._call = None
        self._finished_kernels += 1
        if self._text is None:
            raise CompileRefused("nothing was compiled")
        return self._text

    def abandon(self) -> None:
        """Ends what still runs. For every way out of a compile."""
        self._call = None
        for command in self._running:
            command.kill()
        self._running.clear()

    def run(self, command_line: str, _working_directory: str) -> None:
        """Called by Inductor for each command, in the order: wrapper, kernel, weights, link."""
        words = rewrite_command(shlex.split(command_line), self._isa, str(self._directory))
        step = self._step(words)
        if step in ("wrapper", "kernel"):
            if self._text is None:
                self._text = self._admitted_text(Path(_source(words)))
            words = self._with_header(words, step)
            # Their objects are first needed by the linker, so the two run side by side.
            self._running.append(_Command(step, words, self._directory))
            return
        if step == "link":
            self._finish_running()
            if self._uses_regex_object:
                words.append(str(self._regex_object()))
        self._record(_Command(step, words, self._directory))

    def _step(self, words: Sequence[str]) -> str:
        if "-c" not in words:
            return "link"
        source = _source(words)
        for step in ("wrapper", "kernel"):
            if source.endswith(f"{step}.cpp"):
                return step
        return "weights"

    def _admitted_text(self, wrapper: Path) -> GeneratedText:
        kernels = sorted(wrapper.parent.glob("*kernel.cpp"))
        text = read_generated_text(
            wrapper.read_text(), "\n".join(kernel.read_text() for kernel in kernels)
        )
        if self._call is not None:
            _admit(text, self._call)
        return text

    def _finish_running(self) -> None:
        while self._running:
            self._record(self._running.pop(0))

    def _record(self, command: _Command) -> None:
        command.wait()
        self.seconds[command.step] = round(self.seconds.get(command.step, 0.0) + command.seconds, 4)

    def _with_header(self, words: list[str], step: str) -> list[str]:
        headers = self._headers
        if headers is None or self._finished_kernels < KERNELS_BEFORE_HEADERS:
            return words
        header = headers / f"{step}.h"
        if not header.with_suffix(".h.gch").exists():
            include = next(_includes(Path(_source(words))), None)
            if include is None or not headers.is_dir():
                return words
            extern = _extern_templates("extern ") if step == "wrapper" else ""
            header.write_text(f"#include <{include}>\n{extern}")
            self._record(_Command("headers", _header_command(words, header), self._directory))
        if step == "wrapper":
            self._make_regex_object(words)
            self._uses_regex_object = True
        return [words[0], "-include", str(header), *words[1:]]

    def _regex_object(self) -> Path:
        assert self._headers is not None
        return self._headers / "regex.o"

    def _make_regex_object(self, words: Sequence[str]) -> None:
        target = self._regex_object()
        if target.exists():
            return
        source = target.with_suffix(".cpp")
        source.write_text(_extern_templates(""))
        command = _replaced(words, [str(source)], str(target), keep=("-c",))
        self._record(_Command("headers", command, self._directory))


def _includes(source: Path) -> Iterator[str]:
    for line in source.read_text().splitlines():
        found = re.match(r"\s*#include <(torch/csrc/inductor/[^>]+)>", line)
        if found:
            yield found[1]


def _source(words: Sequence[str]) -> str:
    return next((word for word in words[1:] if word.endswith((".cpp", ".S"))), "")


# The container parses its device string with std::regex, whose instantiation is a third of the
# wrapper's compile. It is the same for every kernel: declared extern in the wrapper's precompiled
# header, instantiated once in an object of its own, and linked into each kernel. The names are
# libstdc++'s.
_REGEX_CLASSES = (
    "class std::basic_regex<char>",
    "class std::__detail::_Compiler<std::regex_traits<char>>",
    "class std::__detail::_Scanner<char>",
    "struct std::__detail::_NFA<std::regex_traits<char>>",
)


def _extern_templates(prefix: str) -> str:
    lines = [f"{prefix}template {name};" for name in _REGEX_CLASSES]
    return "\n".join(["#include <regex>", "#include <string>", *lines, ""])


def _header_command(words: Sequence[str], header: Path) -> list[str]:
    """The command that precompiles ``header`` for exactly the flags of ``words``."""
    return _replaced(words, ["-x", "c++-header", str(header)], f"{header}.gch")


def _replaced(
    words: Sequence[str], source: Sequence[str], target: str, keep: Sequence[str] = ()
) -> list[str]:
    """A compile command with another source and target.

    Without its prefix map, which names a folder that the next command does not have.
    """
    old_source = _source(words)
    command: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith("-ffile-prefix-map="):
            skip = False
        elif word == "-o":
            skip = True
        elif word == old_source:
            command.extend(source)
        elif word != "-c" or "-c" in keep:
            command.append(word)
    return [*command, "-o", target]


class _Command:
    """One running command; its output is kept in a file, so that it never blocks on a full pipe."""

    def __init__(self, step: str, words: Sequence[str], directory: Path) -> None:
        self.step = step
        self.seconds = 0.0  # of CPU time, the compiler's own children included
        self._log = directory / f"{step}.log"
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    words, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            except OSError as error:
                raise CompileFailed(
                    f"the compiler does not start: {error}", transient=True
                ) from error

    def wait(self) -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT
        while True:
            # wait4 tells the CPU time of this very process; Popen would only tell its exit status.
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid != 0:
                break
            if time.monotonic() > deadline:
                self.kill()
                raise CompileFailed(
                    f"the compiler's {self.step} step took over {COMMAND_TIMEOUT:.0f} s",
                    transient=True,
                )
            time.sleep(0.003)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = usage.ru_utime + usage.ru_stime
        if self._process.returncode != 0:
            raise self._failure(self._process.returncode)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _failure(self, code: int) -> CompileFailed:
        output = self._log.read_text(errors="replace")
        lines = output.splitlines()
        line = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        transient = code < 0 or any(
            sign in output
            for sign in (
                "No space left",
                "Cannot allocate memory",
                "out of memory",
                "Killed signal",
            )
        )
        return CompileFailed(
            f"the compiler's {self.step} step exited with {code}: {line.strip()[:200]}",
            transient=transient,
        )


def example_inputs(call: Call) -> tuple[torch.Tensor, ...]:
    """Tensors of the call's metadata for tracing; numbers as 0-dim tensors of their own dtype."""
    sample = call.sample("ones", seed=0)
    return tuple(
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=spec.dtype)
        for value, spec in zip(sample.values, call.tensors, strict=True)
    )


def compile_call(
    call: Call, num_returns: int, directory: Path, commands: BuildCommands
) -> CompiledKernel:
    """The container for ``call``, built in ``directory``, which must be private and empty.

    ``num_returns`` is the number of tensors that native returned. The state of the call must be
    applied. Raises CompileRefused (NoKernelOfItsOwn among them) or CompileFailed.
    """
    begin = time.monotonic()
    inputs = example_inputs(call)
    graph = build_graph(call, num_returns)
    options = _compat.aot_options(directory, commands.compiler.path, call.state.num_threads)
    commands.begin(call, directory)
    try:
        with torch.no_grad():
            path = Path(_compat.aot_compile(graph, inputs, options))
        text = commands.end()
    except BaseException as error:
        commands.abandon()
        ours = _find_cause(error)
        if ours is not None:
            raise ours from error
        if not isinstance(error, Exception):
            raise
        raise CompileFailed(
            _one_line(error), transient=isinstance(error, (OSError, MemoryError))
        ) from (error)
    total = time.monotonic() - begin
    return CompiledKernel(path, text, {**commands.seconds, "wall": round(total, 4)})


def _find_cause(error: BaseException) -> CompileRefused | CompileFailed | None:
    """Our own exception inside the ones that Inductor wrapped around it."""
    seen: set[int] = set()
    chain: list[Any] = [error]
    while chain:
        current = chain.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, (CompileRefused, CompileFailed)):
            return current
        chain += [current.__cause__, current.__context__, getattr(current, "inner_exception", None)]
    return None


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
