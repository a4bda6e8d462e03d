"""What a compile worker finds when it starts: no folder of anybody else's to import from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import clean_environment, run_program
from eagercache.base.worker_environment import (
    LATE_PATHS_VARIABLE,
    import_paths,
    is_trusted,
    trusted_paths,
)
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import warn_about_foreign_entries, worker_environment

pytestmark = pytest.mark.once

FOREIGN = """
open({caught!r}, "a").write("ran\\n")
raise ImportError("this is not the module that was meant")
"""
IN_A_SHARED_FOLDER = """
import json, os, sys
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import WorkerProcess
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
        (shared / f"{module}.py").write_text(FOREIGN.format(caught=str(tmp_path / "caught")))
    environment = clean_environment()
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
    monkeypatch.setenv("PYTHONPATH", "/named")
    monkeypatch.setattr(sys, "path", ["", str(shared), str(own), "/named", library])
    assert trusted_paths() == [str(own), "/named", library]
    monkeypatch.chdir(own)
    assert import_paths(Path("/package"), {}, [""])["PYTHONPATH"] == f"/package:{own}"
    monkeypatch.chdir(shared)
    assert import_paths(Path("/package"), {}, [""])["PYTHONPATH"] == "/package"
    assert is_trusted(own) and not is_trusted(shared) and not is_trusted(shared / "below")


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
@pytest.mark.parametrize("place", ["PYTHON", "PYTHON/usr", "PYTHON/usr/lowering.pyc"])
def test_bytecode_that_was_planted_while_others_could_write_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    place: str,
) -> None:
    # As in an image whose packages have none.
    monkeypatch.setattr("torch.__file__", str(tmp_path / "torch" / "__init__.py"))
    store = tmp_path / "store"
    (store / "PYTHON/usr").mkdir(mode=0o755, parents=True)
    (store / "PYTHON/usr/lowering.pyc").write_bytes(b"made here")
    settings = ServiceSettings(store_root=str(store), environment="")
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    kept = worker_environment(settings, environ)
    assert kept["PYTHONPYCACHEPREFIX"] == str(store / "PYTHON")
    spoil(store / place)
    assert "PYTHONPYCACHEPREFIX" not in worker_environment(settings, environ)
    for _ in range(2):
        warn_about_foreign_entries(store)
    assert len(caplog.records) == 1
    assert f"delete it (rm -r {store})" in caplog.records[0].getMessage()


SHARED_STORE = """
import torch, eagercache
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
x = torch.randn(64, 96)
torch.var(x, -1)
(row,) = eagercache.kernels()
report(decision=row.decision, reason=row.reason)
"""


@pytest.mark.parametrize(("allowed", "decisions"), [("1", ["kernel"]), ("0", [])])
def test_a_store_that_others_may_write_is_filled_where_that_is_allowed(
    cache: Path, allowed: str, decisions: list[str]
) -> None:
    cache.chmod(0o777)
    code = SHARED_STORE if allowed == "1" else SHARED_STORE.partition("(row,)")[0]
    done = run_program(code, cache, fills=True, EAGERCACHE_ALLOW_UNTRUSTED=allowed)
    assert [done["decision"] for _ in decisions] == decisions, done
    assert len(list(cache.rglob("*.so"))) == len(decisions)
