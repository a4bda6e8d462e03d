"""C++ programs that the tests build beside the installed torch, and run without Python."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import eagercache
import pytest
import torch

# Of programs that are to find nothing of Python's.
_OURS = ("EAGERCACHE_", "PYTHON")


def build(source: Path, folder: Path) -> Path:
    """Has CMake build the program in `source` in `folder`, where its executable lies then."""
    variables = {**os.environ, "EAGERCACHE_TORCH_ROOT": str(Path(torch.__file__).parent)}
    package = str(eagercache.cmake_prefix_path)
    for command in (
        ["cmake", "-S", str(source), "-B", str(folder), f"-DCMAKE_PREFIX_PATH={package}"],
        ["cmake", "--build", str(folder)],
    ):
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=240, check=False
            )
        except FileNotFoundError:
            pytest.fail("cmake was not found, which builds the program")
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / source.name


@dataclass(frozen=True)
class Ran:
    """How a program ended, what it printed, and the files of libraries that it loaded."""

    returncode: int
    stdout: str
    stderr: str
    libraries: str


def run(program: Path, *arguments: object, folder: Path, given: str = "", **env: str) -> Ran:
    """Runs a program in `folder`, with nothing to be found in its PATH, over `given` as its input.

    What the loader of libraries looks for is noted by that itself.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    log = folder / "loaded"
    for old in folder.glob("loaded.*"):
        old.unlink()
    variables.update(PATH="/nowhere", LD_DEBUG="files", LD_DEBUG_OUTPUT=str(log), **env)
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        input=given, env=variables, cwd=folder, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    logs = sorted(folder.glob("loaded.*"))
    assert len(logs) == 1, f"{len(logs)} processes were started"
    return Ran(done.returncode, done.stdout, done.stderr, logs[0].read_text(errors="replace"))


def expect_no_python(ran: Ran) -> None:
    """The program met torch's library for GPUs, and nothing of Python's."""
    assert "libtorch_cuda.so" in ran.libraries  # what is loaded is seen
    assert "libpython" not in ran.libraries and "libtorch_python" not in ran.libraries
