"""AOTInductor's own compile of a container: its commands, with our flags and headers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagercache.base.toolchain import Compiler, Isa, rewrite_command
from eagercache.worker.compat import aot_inductor, encoder_layers, lowerings
from eagercache.worker.inductor import common_parts
from eagercache.worker.inductor.commands import Command, CompileFailed
from eagercache.worker.inductor.cuda_container import CudaBuild

# Kernels built before the precompiled headers and the common objects are made. Together those cost
# what they save on about three kernels, and the first kernel of a process must be quick.
KERNELS_BEFORE_HEADERS = 2


# Behind the wrapper's text of an operator's container, whose linker gives it these functions in the
# place of torch's: what loads the container may answer them, for less
# (dispatcher/kernels/container_frame).
SEAMS = """
extern "C" {

using EagercacheMake = int32_t (*)(
    int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);
using EagercacheDrop = int32_t (*)(AtenTensorHandle);
static EagercacheMake eagercache_make = nullptr;
static EagercacheDrop eagercache_drop = nullptr;

// The same functions every time, whatever else runs meanwhile.
__attribute__((visibility("default"))) void eagercache_connect(
    EagercacheMake make, EagercacheDrop drop) {
  __atomic_store_n(&eagercache_make, make, __ATOMIC_RELEASE);
  __atomic_store_n(&eagercache_drop, drop, __ATOMIC_RELEASE);
}

AOTITorchError __real_aoti_torch_empty_strided(
    int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);
__attribute__((visibility("hidden")))
AOTITorchError __wrap_aoti_torch_empty_strided(
    int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
    int32_t device_type, int32_t device_index, AtenTensorHandle* made) {
  const EagercacheMake make = __atomic_load_n(&eagercache_make, __ATOMIC_ACQUIRE);
  if (make && make(ndim, sizes, strides, dtype, device_type, device_index, made) == 0) {
    return AOTI_TORCH_SUCCESS;
  }
  return __real_aoti_torch_empty_strided(
      ndim, sizes, strides, dtype, device_type, device_index, made);
}

AOTITorchError __real_aoti_torch_delete_tensor_object(AtenTensorHandle);
__attribute__((visibility("hidden")))
AOTITorchError __wrap_aoti_torch_delete_tensor_object(AtenTensorHandle handle) {
  const EagercacheDrop drop = __atomic_load_n(&eagercache_drop, __ATOMIC_ACQUIRE);
  if (drop && drop(handle) == 0) {
    return AOTI_TORCH_SUCCESS;
  }
  return __real_aoti_torch_delete_tensor_object(handle);
}

}  // extern "C"
"""
_SEAM_FLAGS = tuple(
    f"-Wl,--wrap=aoti_torch_{name}" for name in ("empty_strided", "delete_tensor_object")
)


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
        self._directory = Path()
        self._running: list[Command] = []
        self._common: list[Path] = []  # objects that the kernel in work is linked with
        self._interface_stays = False  # in the wrapper: it does not compile outside of it
        self._cuda: CudaBuild | None = None  # once there was a container for a GPU
        self._for_gpu = False
        self._seams = False
        self.seconds: dict[str, float] = {}
        aot_inductor.prepare_inductor()
        lowerings.compute_as_native()
        encoder_layers.take_encoder_layers()
        aot_inductor.set_vector_isa(isa)
        aot_inductor.set_command_runner(self.run)

    @property
    def compiler(self) -> Compiler:
        """The compiler that every command is run with."""
        return self._compiler

    def begin(self, directory: Path, *, for_gpu: bool = False, seams: bool = False) -> None:
        """Commands until `end` or `abandon` work in ``directory``. Raises CompileFailed.

        With ``seams`` the wrapper's text has `SEAMS`.
        """
        if for_gpu and self._cuda is None:
            folder = (self._headers or directory) / "cuda"
            folder.mkdir()
            self._cuda = CudaBuild(self._compiler.path, folder)
        self._for_gpu = for_gpu
        self._seams = seams
        self._directory = directory
        self._common = []
        self.seconds = {}

    def end(self) -> None:
        """A container is finished."""
        self._finished_kernels += 1

    def abandon(self) -> None:
        """Ends what still runs. For every way out of a compile."""
        for command in self._running:
            command.kill()
        self._running.clear()

    def run(self, command_line: str, _working_directory: str) -> None:
        """Called by Inductor for each command, in the order: wrapper, kernel, weights, link."""
        words = rewrite_command(shlex.split(command_line), self._isa, str(self._directory))
        if self._for_gpu and self._cuda is not None:
            words = self._cuda.rewrite(words)
        step = self._step(words)
        if step == "wrapper":
            _leave_out_checks(Path(_source(words)))
        if step in ("wrapper", "kernel"):
            words = self._with_header(words, step)
            # Their objects are first needed by the linker, so the two run side by side.
            self._running.append(Command(step, words, self._directory))
            return
        if step == "link":
            self._finish_running()
            words = self._link_command(words)
        self._record(Command(step, words, self._directory))

    def _link_command(self, words: list[str]) -> list[str]:
        seams = _SEAM_FLAGS if self._seams else ()
        return [*words, *map(str, self._common), *seams]

    def _step(self, words: Sequence[str]) -> str:
        if "-c" not in words:
            return "link"
        source = _source(words)
        for step in ("wrapper", "kernel"):
            if source.endswith(f"{step}.cpp"):
                return step
        return "weights"

    def _finish_running(self) -> None:
        while self._running:
            self._record(self._running.pop(0))

    def _record(self, command: Command) -> None:
        command.wait()
        self.seconds[command.step] = round(self.seconds.get(command.step, 0.0) + command.seconds, 4)

    def _with_header(self, words: list[str], step: str) -> list[str]:
        headers = self._headers
        if headers is None or self._finished_kernels < KERNELS_BEFORE_HEADERS:
            return words
        header = headers / (f"{step}_cuda.h" if self._for_gpu else f"{step}.h")
        if not header.with_suffix(".h.gch").exists():
            include = next(_includes(Path(_source(words))), None)
            if include is None or not headers.is_dir():
                return words
            extern = common_parts.regex_templates("extern ") if step == "wrapper" else ""
            header.write_text(f"#include <{include}>\n{extern}")
            self._record(Command("headers", _header_command(words, header), self._directory))
        if step == "wrapper":
            self._common = [self._common_object("regex", common_parts.regex_templates(""), words)]
            self._take_interface([words[0], "-include", str(header), *words[1:]])
        return [words[0], "-include", str(header), *words[1:]]

    def _take_interface(self, words: Sequence[str]) -> None:
        """Leaves out of the wrapper what is the same in all of them, if that can stand alone."""
        wrapper = Path(_source(words))
        rest = common_parts.without_interface(wrapper.read_text())
        if rest is None or self._for_gpu or self._interface_stays:
            return
        try:
            made = self._common_object("interface", common_parts.interface_text(), words)
        except CompileFailed as error:
            if error.transient:
                raise
            self._interface_stays = True
            return
        wrapper.write_text(rest)
        self._common.append(made)

    def _common_object(self, name: str, text: str, words: Sequence[str]) -> Path:
        assert self._headers is not None
        target = self._headers / f"{name}.o"
        if not target.exists():
            source = target.with_suffix(".cpp")
            source.write_text(text)
            command = _replaced(words, [str(source)], str(target), keep=("-c",))
            command.append(f"-ffile-prefix-map={self._headers}=.")
            self._record(Command("headers", command, self._directory))
        return target


def _leave_out_checks(wrapper: Path) -> None:
    wrapper.write_text(common_parts.without_checks(wrapper.read_text(), os.environ))


def _includes(source: Path) -> Iterator[str]:
    for line in source.read_text().splitlines():
        found = re.match(r"\s*#include <(torch/csrc/inductor/[^>]+)>", line)
        if found:
            yield found[1]


def _source(words: Sequence[str]) -> str:
    return next((word for word in words[1:] if word.endswith((".cpp", ".S"))), "")


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
