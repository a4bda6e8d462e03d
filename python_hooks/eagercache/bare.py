"""Compiles bare kernels: Inductor's kernel functions, with none of AOTInductor's wrapper.

Any number of calls share one translation unit and one shared object, which has no constructor, no
global state and, unless a kernel calls a vector function of Sleef, needs nothing of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import _compat
from .commands import Command, CompileFailed
from .launch_plan import LaunchPlan
from .shape_plan import ShapePlan
from .toolchain import LINK_FLAGS, Compiler, Isa, rewrite_command

# Translation units compiled before the precompiled header is made. It costs 4 s of CPU time and
# saves 0.9 s a unit; the first kernel of a process must be quick.
UNITS_BEFORE_HEADER = 2

_PROLOGUE = "#include <torch/csrc/inductor/cpp_prefix.h>\n#include <cstdint>\n"


class BareBuilder:
    """Compiles for one worker process. Not thread-safe.

    ``private`` is a directory that lives as long as the object; None: no precompiled header.
    """

    def __init__(self, compiler: Compiler, isa: Isa, private: Path | None) -> None:
        self._compiler = compiler
        self._isa = isa
        self._private = private
        self._flags: list[str] | None = None
        self._units = 0
        self.seconds: dict[str, float] = {}  # CPU time of the latest build, by step

    def build(self, plans: Sequence[LaunchPlan | ShapePlan], directory: Path) -> Path:
        """One shared object with the entries of all ``plans``. Raises CompileFailed."""
        self.seconds = {}
        source, target = directory / "kernels.cpp", directory / "kernels.o"
        # Equal kernels have equal entries; each is defined once.
        bodies = {plan.entry: plan.source for plan in plans}
        source.write_text(_PROLOGUE + "\n".join(bodies[entry] for entry in sorted(bodies)))
        words = [*self._compile_flags(directory), *self._header(directory)]
        words += [str(source), "-o", str(target)]
        self._run("kernel", words, directory)
        self._units += 1
        return self._link(target, directory)

    def _compile_flags(self, directory: Path) -> list[str]:
        if self._flags is None:
            self._flags = _compat.kernel_compile_command(self._compiler.path)
        words = rewrite_command([*self._flags, "-c"], self._isa, str(directory))
        return [*words, "-fvisibility=hidden"]

    def _header(self, directory: Path) -> list[str]:
        if self._private is None or self._units < UNITS_BEFORE_HEADER:
            return []
        header = self._private / "bare.h"
        if not header.with_suffix(".h.gch").exists():
            if not self._private.is_dir():
                return []
            header.write_text(_PROLOGUE)
            words = self._compile_flags(directory)
            words += ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
            try:
                self._run("headers", words, directory)
            except CompileFailed:
                self._private = None  # no header is no reason to have no kernel
                return []
        return ["-include", str(header)]

    def _link(self, target: Path, directory: Path) -> Path:
        library = directory / "kernels.so"
        words = [self._compiler.path, "-shared", "-fPIC", str(target), "-o", str(library)]
        words += [*LINK_FLAGS, "-Wl,--as-needed", "-lgomp"]
        if b"Sleef_" not in target.read_bytes():
            try:
                self._run("link", [*words, "-Wl,-z,defs"], directory)
            except CompileFailed as error:
                if error.transient:
                    raise
            else:
                return library
        self._run("link", [*words, "-Wl,--no-as-needed", str(self._stub(directory))], directory)
        return library

    def _stub(self, directory: Path) -> Path:
        """An empty library of libtorch_cpu's name: reading the real one costs 0.15 s a link."""
        folder = self._private if self._private is not None else directory
        stub = folder / "libtorch_cpu.so"
        if not stub.exists():
            empty = folder / "empty.c"
            empty.write_text("")
            words = [self._compiler.path, "-shared", "-fPIC", "-nostdlib", "-x", "c", str(empty)]
            words += ["-Wl,-soname,libtorch_cpu.so", "-o", str(stub)]
            self._run("link", words, directory)
        return stub

    def _run(self, step: str, words: list[str], directory: Path) -> None:
        command = Command(step, words, directory)
        command.wait()
        self.seconds[step] = round(self.seconds.get(step, 0.0) + command.seconds, 4)
