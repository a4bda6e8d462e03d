"""How compilers are run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from eagercache.worker.inductor.commands import Command, compiler_environment

pytestmark = pytest.mark.once

VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_RUN_PATH", "SOURCE_DATE_EPOCH"),
)


def test_a_compiler_is_told_nothing_that_is_in_no_key() -> None:
    environ = dict.fromkeys((*VARIABLES, "PATH", "HOME", "TMPDIR", "LANG"), "/elsewhere")
    told = compiler_environment(environ)
    assert told == {**dict.fromkeys(("PATH", "HOME", "TMPDIR"), "/elsewhere"), "LC_ALL": "C"}


def test_a_header_of_somebody_elses_is_not_compiled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    (tmp_path / "math.h").write_text('#error "this header was meant for something else"\n')
    (tmp_path / "a.cpp").write_text("#include <math.h>\nint main() { return 0; }\n")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("COMPILER_PATH", "GCC_EXEC_PREFIX"):
        monkeypatch.setenv(name, f"{tmp_path}/")
    (tmp_path / "cc1plus").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "cc1plus").chmod(0o755)
    build = tmp_path / "build"
    build.mkdir()
    Command("kernel", [compiler, "-c", str(tmp_path / "a.cpp"), "-o", "a.o"], build).wait()
    assert (build / "a.o").exists()
