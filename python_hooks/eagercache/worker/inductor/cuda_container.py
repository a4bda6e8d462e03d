"""What a container for a GPU is compiled and linked against: no CUDA toolkit, and no GPU.

Triton, which stands beside every torch that generates code for GPUs, brings CUDA's headers. They
include one that it does not bring where they define numbers of half precision; the host's half of
a container computes with none, so that those headers are empty here. The driver's library is
linked by name alone: what is found under that name at run time is the one that the process has.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from eagercache.worker.compat import triton_kernels
from eagercache.worker.inductor.commands import Command, CompileFailed

DRIVER = "libcuda.so.1"
_EMPTY_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")


def cuda_home() -> Path:
    """A folder whose "include" holds CUDA's headers. Raises CompileFailed."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise CompileFailed("there is no Triton, whose headers are needed", transient=False)
    home = Path(spec.origin).parent / "backends" / "nvidia"
    if not (home / "include" / "cuda_runtime.h").is_file():
        raise CompileFailed("this Triton brings no headers of CUDA", transient=False)
    return home


class CudaBuild:
    """Changes a container's commands so that they need nothing but g++.

    ``folder`` is private and lives as long as the object.
    """

    def __init__(self, compiler: str, folder: Path) -> None:
        self._headers = folder / "headers"
        self._driver = folder / "libcuda.so"
        triton_kernels.use_cuda_headers(cuda_home())
        self._headers.mkdir(parents=True, exist_ok=True)
        for name in _EMPTY_HEADERS:
            (self._headers / name).write_text("")
        source = folder / "nothing.c"
        source.write_text("")
        words = [compiler, "-shared", "-nostdlib", "-x", "c", str(source)]
        Command("driver", [*words, f"-Wl,-soname,{DRIVER}", "-o", str(self._driver)], folder).wait()

    def rewrite(self, words: Sequence[str]) -> list[str]:
        """One command of Inductor's, compiling or linking."""
        if "-c" in words:
            return [words[0], f"-I{self._headers}", *words[1:]]
        driver = ["-Wl,--push-state,--no-as-needed", str(self._driver), "-Wl,--pop-state"]
        kept = [word for word in words if word != "-lcuda" and not word.startswith("-lcudart")]
        return [*kept, *driver]
