"""The import beside a torch that nobody has tried: what is said, checked, kept and left native."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, clean_environment
from eagercache.base import torch_versions, untried_torch

TRIED = "TRIED = ("
PASSED = "Its self-check there passed."
PROGRAM = """
import torch, eagercache
eagercache.enable(["var.correction"], on_miss="native")
x = torch.ones(3, 3)
for _ in range(3): torch.var(x, -1)
print(eagercache.available(), torch.var(x, -1).sum().item(), eagercache.stats().misses > 0)
"""
SAYS = "import json; print(json.dumps({{'problem': {problem!r}, 'lasting': {lasting}}}))"


@pytest.fixture
def untried(tmp_path: Path) -> Path:
    """The package in a folder for PYTHONPATH; its table of torch releases has not the one here.

    Its self-check is a line that passes, where a test does not put the real one back.
    """
    installed, package = Path(PACKAGE_ROOT, "eagercache"), tmp_path / "untried" / "eagercache"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    table = package / "base" / "torch_versions.py"
    text = table.read_text()
    begin, end = text.index(TRIED), text.index("\n)\n")
    table.write_text(text[:begin] + TRIED + '\n    Tried("2.9.7", "3.10"),' + text[end:])
    check(package, SAYS.format(problem="", lasting=True))
    return package


def check(package: Path, code: str) -> None:
    """Puts code in the place of the self-check. It leaves a mark beside the package."""
    mark = f"open({str(package.parent / 'mark')!r}, 'a').write('x')\n"
    (package / "base" / "self_check.py").write_text(mark + code)


def checks(package: Path) -> int:
    """How often the self-check ran."""
    mark = package.parent / "mark"
    return len(mark.read_text()) if mark.exists() else 0


def run(package: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    store = {"EAGERCACHE_DIR": str(package.parent.parent / "store")}
    environment = clean_environment(**{**store, **variables, "PYTHONPATH": str(package.parent)})
    return subprocess.run(
        [sys.executable, *(command or ("-c", PROGRAM))],
        env=environment,
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_hooks_a_kernel_and_a_module_are_tried_and_the_program_goes_on(untried: Path) -> None:
    shutil.copy(Path(PACKAGE_ROOT, "eagercache/base/self_check.py"), untried / "base")
    done = run(untried)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True 0.0 True\n", done.stderr
    assert "eagercache was tried with torch 2.9.7, and not with 2." in done.stderr
    assert PASSED in done.stderr
    known = json.loads((untried.parent.parent / "store" / untried_torch.NAME).read_text())
    assert list(known.values()) == [""]


def test_what_the_check_found_is_kept_for_this_torch_and_module(untried: Path) -> None:
    for _ in range(2):
        done = run(untried)
        assert done.stdout == "True 0.0 True\n" and PASSED in done.stderr, done.stderr
    assert checks(untried) == 1
    info = untried / "_build_info.py"
    info.write_text(info.read_text().replace('REVISION = "', 'REVISION = "another'))
    assert PASSED in run(untried).stderr
    assert checks(untried) == 2


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "it was ended by signal 6"),
        ("raise RuntimeError('no such operator')", "RuntimeError: no such operator"),
        (SAYS.format(problem="an answer differs", lasting=True), "an answer differs"),
    ],
)
def test_where_the_check_fails_all_stays_native_and_one_line_says_so(
    untried: Path, code: str, reason: str
) -> None:
    check(untried, code)
    for _ in range(2):
        done = run(untried)
        assert (done.returncode, done.stdout) == (0, "False 0.0 False\n"), done.stderr
        said = [line for line in done.stderr.splitlines() if "eagercache was tried" in line]
        end = f"Its self-check there failed: {reason}. Everything stays native."
        assert len(said) == 1 and said[0].endswith(end), done.stderr
    assert checks(untried) == 1


def test_what_may_pass_is_not_kept(untried: Path) -> None:
    check(untried, SAYS.format(problem="no memory", lasting=False))
    for count in (1, 2):
        assert "no memory" in run(untried).stderr
        assert checks(untried) == count


def test_a_verdict_that_others_may_have_written_is_not_believed(untried: Path) -> None:
    run(untried)
    (untried.parent.parent / "store" / untried_torch.NAME).chmod(0o666)
    assert PASSED in run(untried).stderr
    assert checks(untried) == 2


def test_workers_and_commands_check_nothing(untried: Path) -> None:
    assert "was tried" not in run(untried, EAGERCACHE_INSIDE_WORKER="1").stderr
    doctor = run(untried, "-m", "eagercache", "doctor")
    assert "eagercache was tried with torch 2.9.7, and not with 2." in " ".join(
        doctor.stdout.split()
    )
    assert checks(untried) == 0


def test_where_the_store_cannot_be_made_each_process_checks(untried: Path) -> None:
    (untried.parent / "file").touch()
    store = str(untried.parent / "file" / "store")
    for count in (1, 2):
        assert PASSED in run(untried, "-c", "import eagercache", EAGERCACHE_DIR=store).stderr
        assert checks(untried) == count


def test_the_check_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untried_torch, "LIMIT_S", 0.01)
    problem, lasting = untried_torch._check()
    assert "did not end within" in problem and not lasting


def test_pre_releases_and_later_minors_are_untried() -> None:
    newest = torch_versions.TRIED[-1].torch
    assert torch_versions.is_tried(newest)
    for version in (f"{newest}rc1", f"{newest}.dev20261101+cpu", "2.99.0"):
        assert not torch_versions.is_tried(version)
        assert untried_torch.remark(version).endswith(f"{newest}, and not with {version}")
