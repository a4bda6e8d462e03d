"""What a compile worker finds when it starts: no folder of anybody else's to import from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment
from eagercache.worker_environment import LATE_PATHS_VARIABLE, import_paths, is_trusted

pytestmark = pytest.mark.once

FOREIGN = """
import os
open(os.environ["CAUGHT"], "a").write("ran\\n")
raise ImportError("this is not the module that was meant")
"""
IN_A_SHARED_FOLDER = """
import json, os, sys
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
from eagercache.service_settings import ServiceSettings
from eagercache.worker_process import WorkerProcess
settings = ServiceSettings(store_root="/nowhere", environment="a: 1\\n")
process = WorkerProcess(settings)
process._read(120.0, "start")
print(os.readlink(f"/proc/{process.pid}/cwd"))
process.kill()
"""


@pytest.mark.parametrize("named", ["", "{package}:", ":{package}"])
def test_a_worker_runs_no_code_of_the_folder_that_the_program_is_in(
    tmp_path: Path, named: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for module in ("resource", "torch", "ctypes", "sitecustomize", "usercustomize"):
        (shared / f"{module}.py").write_text(FOREIGN)
    environment = clean_environment(CAUGHT=str(tmp_path / "caught"))
    package = environment["PYTHONPATH"]
    (tmp_path / "program.py").write_text(IN_A_SHARED_FOLDER)
    shared.chmod(0o777)
    # The program itself is started so that it does not import from there; its worker inherits what
    # PYTHONPATH says, in which an empty entry is the current folder.
    start = f"import sys, runpy; sys.path.insert(0, {package!r}); import os"
    start += f"; os.environ['PYTHONPATH'] = {named.format(package=package)!r}"
    start += f"; os.chdir({str(shared)!r})"
    start += f"; runpy.run_path({str(tmp_path / 'program.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-I", "-c", start],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert not (tmp_path / "caught").exists()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["/"]


def test_a_worker_imports_from_where_the_program_does_if_nobody_else_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared, late = tmp_path / "own", tmp_path / "shared", tmp_path / "late"
    for folder in (own, shared, late):
        folder.mkdir(mode=0o755)
    shared.chmod(0o777)
    library = str(Path(os.__file__).parent)
    installed = str(tmp_path / "site-packages")
    path = [str(shared), str(own), "/named", library, installed, str(late), str(shared / "x")]
    variables = import_paths(Path("/package"), {"PYTHONPATH": ":/named::/other"}, path)
    assert variables["PYTHONPATH"].split(":") == ["/package", str(own), "/named", "/other"]
    assert variables[LATE_PATHS_VARIABLE] == str(late)
    assert variables["PYTHONSAFEPATH"] == "1"
    monkeypatch.chdir(own)
    assert import_paths(Path("/package"), {}, [""])["PYTHONPATH"] == f"/package:{own}"
    monkeypatch.chdir(shared)
    assert import_paths(Path("/package"), {}, [""])["PYTHONPATH"] == "/package"
    assert is_trusted(own) and not is_trusted(shared) and not is_trusted(shared / "below")
