"""Compiles bare kernels: Inductor's kernel functions, with none of AOTInductor's wrapper.

Any number of calls share one translation unit and one shared object, which has no constructor, no
global state and, unless a kernel calls a vector function of Sleef, needs nothing of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagercache.base.toolchain import LINK_FLAGS, Compiler, Isa, rewrite_command
from eagercache.calls import contract
from eagercache.worker.compat import aot_inductor
from eagercache.worker.inductor.commands import Command, CompileFailed, empty_library
from eagercache.worker.inductor.launch_plan import LaunchPlan
from eagercache.worker.inductor.shape_plan import ShapePlan
from eagercache.worker.inductor.shared_header import NAME, SharedHeader, compiled
from eagercache.worker.inductor.vector_math import SOURCE

# Translation units compiled before the precompiled header is made. It costs 5 s of CPU time and
# saves 1.5 s a unit; the first kernel of a process must be quick.
UNITS_BEFORE_HEADER = 2

_PROLOGUE = "#include <torch/csrc/inductor/cpp_prefix.h>\n#include <cstdint>\n" + SOURCE


class BareBuilder:
    """Compiles for one worker process. Not thread-safe.

    ``private`` is a directory that lives as long as the object; None: no precompiled header.
    ``store`` is the store's directory, where the header is kept for other workers; None: it is not.
    """

    def __init__(
        self, compiler: Compiler, isa: Isa, private: Path | None, store: Path | None = None
    ) -> None:
        self._compiler = compiler
        self._isa = isa
        self._private = private
        self._store = store
        self._header: Path | None = None
        self._shared: SharedHeader | None = None
        self._flags: list[str] | None = None
        self._units = 0
        self.seconds: dict[str, float] = {}  # CPU time of the latest build, by step

    def build(
        self,
        plans: Sequence[LaunchPlan | ShapePlan],
        directory: Path,
        contracts: Sequence[str] = (),
    ) -> Path:
        """One shared object with the entries of all ``plans``. Raises CompileFailed.

        ``contracts`` say of which entries of a store it is (calls/contract.py).
        """
        self.seconds = {}
        source, target = directory / "kernels.cpp", directory / "kernels.o"
        # Equal kernels have equal entries; each is defined once.
        bodies = {plan.entry: plan.source for plan in plans}
        texts = [bodies[entry] for entry in sorted(bodies)]
        source.write_text(_PROLOGUE + "\n".join([*texts, contract.definition(contracts)]))
        words = [*self._compile_flags(directory), str(source), "-o", str(target)]
        header = self._find_header(directory)
        try:
            self._run("kernel", _including(header, words), directory)
        except CompileFailed as error:
            if header is None or error.transient:
                raise
            self._run("kernel", words, directory)
            self._drop_header()  # it was the header's fault
        self._units += 1
        return self._link(target, directory)

    def _compile_flags(self, directory: Path) -> list[str]:
        if self._flags is None:
            self._flags = aot_inductor.kernel_compile_command(self._compiler.path)
        words = rewrite_command([*self._flags, "-c"], self._isa, str(directory))
        return [*words, "-fvisibility=hidden"]

    def _find_header(self, directory: Path) -> Path | None:
        """The precompiled header: one that some worker left, or our own, after some units."""
        if self._private is None:
            return None
        if self._header is None and self._store is not None:
            self._header = self._sharing(self._store, directory).find()
        if self._header is None or not compiled(self._header).exists():
            self._header = None
            if self._units >= UNITS_BEFORE_HEADER and self._private.is_dir():
                self._header = self._make_header_alone(self._private, directory)
        return self._header

    def _sharing(self, store: Path, directory: Path) -> SharedHeader:
        if self._shared is None:
            place = str(directory)
            words = [word for word in self._compile_flags(directory) if place not in word]
            self._shared = SharedHeader(store, repr(self._compiler), [*words, _PROLOGUE])
        return self._shared

    def _make_header_alone(self, private: Path, directory: Path) -> Path | None:
        """The same, made now, by this worker or, a moment ago, by another; None while one does."""
        if self._store is None:
            return self._make_header(private, directory)
        shared = self._sharing(self._store, directory)
        with shared.making() as alone:
            return shared.find() or self._make_header(private, directory) if alone else None

    def _make_header(self, private: Path, directory: Path) -> Path | None:
        folder = private / "bare"
        folder.mkdir(exist_ok=True)
        header, dependencies = folder / NAME, directory / "headers.d"
        header.write_text(_PROLOGUE)
        words = [*self._compile_flags(directory), "-MD", "-MF", str(dependencies)]
        words += ["-x", "c++-header", str(header), "-o", str(compiled(header))]
        try:
            self._run("headers", words, directory)
        except CompileFailed:
            self._private = None  # no header is no reason to have no kernel
            return None
        shared = self._shared.put(header, [dependencies]) if self._shared is not None else None
        return shared or header

    def _drop_header(self) -> None:
        self._private = self._header = None
        if self._shared is not None:
            self._shared.remove()

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
        """In the place of the library that has the vector functions."""
        folder = self._private if self._private is not None else directory

        def run(words: list[str]) -> None:
            self._run("link", words, directory)

        return empty_library(self._compiler.path, folder, "libtorch_cpu.so", run)

    def _run(self, step: str, words: list[str], directory: Path) -> None:
        command = Command(step, words, directory)
        command.wait()
        self.seconds[step] = round(self.seconds.get(step, 0.0) + command.seconds, 4)


def _including(header: Path | None, words: Sequence[str]) -> list[str]:
    return [*words] if header is None else [words[0], "-include", str(header), *words[1:]]
