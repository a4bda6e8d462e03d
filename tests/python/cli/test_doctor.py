"""What `eagercache doctor` finds, and that it says what it cannot look at."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from made_store import run, store

__all__ = ["store"]

pytestmark = pytest.mark.once


def test_doctor_names_the_field_that_differs(store: Any) -> None:
    result = run("doctor")
    assert "1 kernel, 1 decision for native and 1 failure" in result.output
    assert "torch.version (1.0, 2." in result.output
    checks = json.loads(run("doctor", "--json").output)
    assert {check["name"] for check in checks} >= {"platform", "torch", "compiler", "store"}
    assert result.exit_code == (1 if any(c["state"] == "problem" for c in checks) else 0)


def test_doctor_names_a_missing_compiler_and_open_permissions(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGERCACHE_CXX", "/nowhere/g++")
    cache.chmod(0o777)
    result = run("doctor")
    assert result.exit_code == 1
    assert "/nowhere/g++" in result.output and "remedy: install g++" in result.output
    assert str(cache) in result.output and "0700" in result.output


def test_doctor_says_whether_a_worker_has_to_compile_inductors_sources(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> str:
        checks = json.loads(run("doctor", "--json").output)
        (check,) = [check for check in checks if check["name"] == "bytecode"]
        return str(check["state"])

    folder = tmp_path / "torch/_inductor"
    monkeypatch.setattr("eagercache.service.worker_process.inductor_folder", lambda: folder)
    assert state() == "note"
    compiled = Path(importlib.util.cache_from_source(str(folder / "lowering.py")))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert state() == "ok"


@pytest.mark.parametrize(
    "broken",
    ["environment.environment_text", "shutil.disk_usage", "worker_process.bytecode_folder"],
)
def test_doctor_says_what_it_cannot_check(
    store: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(f"eagercache.cli.diagnoses.diagnosis.{broken}", fail)
    result = run("doctor", "--json")
    assert result.exit_code == 1 and result.exception.__class__ is SystemExit
    checks = json.loads(result.output)
    assert any("cannot be checked: PermissionError" in check["text"] for check in checks)
    assert {"platform", "torch"} < {check["name"] for check in checks}
