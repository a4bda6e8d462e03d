"""AOTInductor's own compile of a container: its commands, with our flags and headers."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagercache.base.toolchain import Compiler, Isa, rewrite_command
from eagercache.worker.compat import aot_inductor, encoder_layers, lowerings
from eagercache.worker.inductor import common_parts
from eagercache.worker.inductor.commands import Command, CompileFailed, empty_library
from eagercache.worker.inductor.container_headers import ContainerHeaders, source_of
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
    the object, for what is precompiled; that is taken from ``store``, the store's directory, where
    another worker left it there, or made once enough kernels have been built to pay for it.
    """

    def __init__(
        self, compiler: Compiler, isa: Isa, headers: Path | None, store: Path | None = None
    ) -> None:
        self._compiler = compiler
        self._isa = isa
        self._private = headers
        self._headers: ContainerHeaders | None = None
        if headers is not None:
            self._headers = ContainerHeaders(compiler, headers, store, self._run_at_once)
        self._finished_kernels = 0
        self._directory = Path()
        # With the command without a header, if it has one, and the text that this compiles.
        self._running: list[tuple[Command, list[str] | None, str]] = []
        self._common: list[Path] = []  # objects that the kernel in work is linked with
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
            folder = (self._private or directory) / "cuda"
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
        for command, _, _ in self._running:
            command.kill()
        self._running.clear()

    def run(self, command_line: str, _working_directory: str) -> None:
        """Called by Inductor for each command, in the order: wrapper, kernel, weights, link."""
        words = rewrite_command(shlex.split(command_line), self._isa, str(self._directory))
        if self._for_gpu and self._cuda is not None:
            words = self._cuda.rewrite(words)
        step = self._step(words)
        if step == "wrapper":
            _leave_out_checks(Path(source_of(words)))
        if step in ("wrapper", "kernel"):
            text = Path(source_of(words)).read_text()
            told = self._with_header(words, step)
            # Their objects are first needed by the linker, so the two run side by side.
            command = Command(step, told, self._directory)
            self._running.append((command, None if told == words else words, text))
            return
        if step == "link":
            self._finish_running()
            words = self._link_command(words)
        self._record(Command(step, words, self._directory))

    def _link_command(self, words: list[str]) -> list[str]:
        seams = _SEAM_FLAGS if self._seams else ()
        return [*self._without_reading_torch(words), *map(str, self._common), *seams]

    def _without_reading_torch(self, words: list[str]) -> list[str]:
        """On CPU with empty libraries in the place of torch's, which take 0.25 s to read."""
        names = [word for word in words if word in ("-ltorch", "-ltorch_cpu")]
        if self._private is None or not names or "-ltorch_cuda" in words:
            return words
        for name in names:
            run = functools.partial(self._run_at_once, "link")
            empty_library(words[0], self._private, f"lib{name[2:]}.so", run)
        place, rest = words.index(names[0]), [word for word in words if word not in names]
        needed = ["-Wl,--push-state,--no-as-needed", *names, "-Wl,--pop-state"]
        return [*rest[:place], f"-L{self._private}", *needed, *rest[place:]]

    def _step(self, words: Sequence[str]) -> str:
        if "-c" not in words:
            return "link"
        source = source_of(words)
        for step in ("wrapper", "kernel"):
            if source.endswith(f"{step}.cpp"):
                return step
        return "weights"

    def _finish_running(self) -> None:
        while self._running:
            command, plain, text = self._running.pop(0)
            try:
                self._record(command)
            except CompileFailed as error:
                if plain is None or error.transient:
                    raise
                self._run_plain(command.step, plain, text)

    def _run_at_once(self, step: str, words: list[str]) -> None:
        self._record(Command(step, words, self._directory))

    def _record(self, command: Command) -> None:
        command.wait()
        self.seconds[command.step] = round(self.seconds.get(command.step, 0.0) + command.seconds, 4)

    def _with_header(self, words: list[str], step: str) -> list[str]:
        """The command with what is precompiled for it; a wrapper's text has less then."""
        if self._headers is None:
            return words
        kind = self._kind(step)
        source = Path(source_of(words))
        rest = common_parts.without_interface(source.read_text()) if step == "wrapper" else None
        made = self._headers.find(kind, words)
        if made is None:
            include = next(_includes(source), None)
            if self._finished_kernels < KERNELS_BEFORE_HEADERS or include is None:
                return words
            stands_alone = rest is not None and not self._for_gpu
            made = self._headers.make(kind, words, include, interface=stands_alone)
        if made is None:
            return words
        if "regex" in made.objects:
            self._common.append(made.objects["regex"])
        if rest is not None and not self._for_gpu and "interface" in made.objects:
            source.write_text(rest)
            self._common.append(made.objects["interface"])
        return [words[0], "-include", str(made.header), *words[1:]]

    def _run_plain(self, step: str, words: list[str], text: str) -> None:
        """Compiles a part without what is precompiled, which nobody uses any more if that helps."""
        Path(source_of(words)).write_text(text)
        self._record(Command(step, words, self._directory))
        if step == "wrapper":
            self._common = []
        if self._headers is not None:
            self._headers.drop(self._kind(step))

    def _kind(self, step: str) -> str:
        return f"{step}_cuda" if self._for_gpu else step


def _leave_out_checks(wrapper: Path) -> None:
    wrapper.write_text(common_parts.without_checks(wrapper.read_text(), os.environ))


def _includes(source: Path) -> Iterator[str]:
    for line in source.read_text().splitlines():
        found = re.match(r"\s*#include <(torch/csrc/inductor/[^>]+)>", line)
        if found:
            yield found[1]
