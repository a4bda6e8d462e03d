"""The import: platform, and the torch that the module was built against."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, clean_environment, run_program
from eagercache.base import command_line, load, torch_versions


@pytest.mark.parametrize(
    ("build", "run", "names"),
    [("2.11.0+cu130", "2.15.0+cu130", ("2.11.0+cu130", "2.15.0+cu130")), ("2.15.0", "3.0.1", ())],
)
def test_another_torch_is_refused_naming_both_sides_and_the_remedy(
    build: str, run: str, names: tuple[str, ...]
) -> None:
    text = load.mismatch(build, True, run, True)
    assert text is not None
    assert build in text and run in text and "Rebuild" in text
    assert all(name in text for name in names)


def test_a_patch_release_or_another_local_tag_is_accepted() -> None:
    assert load.mismatch("2.11.0+cu130", True, "2.11.1+cpu", True) is None


def test_another_abi_is_refused() -> None:
    text = load.mismatch("2.11.0", True, "2.11.0", False)
    assert text is not None and "ABI" in text


def test_other_platforms_are_named() -> None:
    assert torch_versions.platform_problem("Linux", "x86_64") is None
    for system, machine in (("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")):
        text = torch_versions.platform_problem(system, machine)
        assert text is not None and machine in text
        assert ("what is missing is the extension" in text) == (machine == "aarch64")


def test_on_another_platform_the_import_says_so_once_and_does_nothing() -> None:
    result = run_program(
        """
        import platform, warnings
        platform.machine = lambda: "aarch64"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import eagercache
        import torch
        handle = eagercache.enable()
        eagercache.register("aten::abs")
        eagercache.disable()
        report(said=len(caught), active=handle.active, available=eagercache.available(),
               hits=eagercache.stats().hits, waited=eagercache.wait(1),
               kernels=eagercache.kernels(),
               loaded="eagercache._C" in __import__("sys").modules)
        """,
        None,
    )
    assert result["said"] == 1
    assert not result["active"] and not result["available"] and not result["loaded"]
    assert result["hits"] == 0 and result["waited"] and result["kernels"] == []


@pytest.fixture
def misfit(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which eagercache was built against another torch."""
    installed, package = Path(PACKAGE_ROOT, "eagercache"), tmp_path / "eagercache"
    for file in installed.rglob("*.py"):
        copy = package / file.relative_to(installed)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    info = package / "_build_info.py"
    info.write_text(info.read_text().replace('TORCH_VERSION = "2.', 'TORCH_VERSION = "1.'))
    return tmp_path


def test_the_check_comes_before_the_module_is_loaded(misfit: Path) -> None:
    (misfit / "eagercache" / "_C.py").write_text("raise SystemExit('the module was loaded')")
    done = subprocess.run(
        [sys.executable, "-c", "import eagercache"],
        env=clean_environment(PYTHONPATH=str(misfit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "was built against torch 1." in done.stderr
    assert "the module was loaded" not in done.stderr


def _command(misfit: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagercache", *words],
        env=clean_environment(PYTHONPATH=str(misfit)),
        cwd=misfit,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("options", [[], ["--report"], ["--modules", "auto"]])
def test_a_program_runs_natively_under_a_torch_that_does_not_fit(
    misfit: Path, options: list[str]
) -> None:
    program = (
        "import os, sys, torch\nprint(torch.ones(2).sum().item(), 'eagercache' in sys.modules)"
    )
    (misfit / "program.py").write_text(program + "\nsys.exit(7)\n")
    done = _command(misfit, "run", *options, "program.py")
    assert (done.returncode, done.stdout) == (7, "2.0 False\n"), done.stderr
    assert done.stderr.count("\n") == 1 and "was built against torch 1." in done.stderr


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["stats"], ["ls"]])
def test_commands_say_in_one_line_that_torch_does_not_fit(misfit: Path, words: list[str]) -> None:
    done = _command(misfit, *words)
    assert done.returncode == (1 if words[0] == "doctor" else 2)
    assert "was built against torch 1." in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "words", "is_ours"),
    [
        (["-m", "ls"], ["python", "-m", "eagercache", "ls"], True),
        (["-m"], ["python", "-Im", "eagercache"], True),
        (["/venv/bin/eagercache", "ls"], ["python", "/venv/bin/eagercache", "ls"], True),
        (["-m", "eagercache"], ["python", "-m", "program", "eagercache"], False),
        (["program.py", "-m", "eagercache"], ["python", "program.py", "-m", "eagercache"], False),
        (["-c"], ["python", "-c", "import eagercache"], False),
        ([""], ["python"], False),
    ],
)
def test_the_command_is_told_from_programs(
    argv: list[str], words: list[str], is_ours: bool
) -> None:
    assert command_line.is_command_line(argv, words) == is_ours


def test_import_does_not_pull_in_the_compiler_or_touch_cuda() -> None:
    result = run_program(
        """
        import sys, torch
        before = set(sys.modules)
        import eagercache
        new = set(sys.modules) - before
        report(heavy=sorted(m for m in new if m.startswith(("torch._inductor", "torch._dynamo"))),
               cuda=torch.cuda.is_initialized())
        """,
        None,
    )
    assert result["heavy"] == []
    assert result["cuda"] is False


def test_threads_inside_the_core_do_not_abort_a_process_that_ends(tmp_path: Path) -> None:
    code = """
import threading
import torch, eagercache
from eagercache import _C
eagercache.enable(["var.correction"], on_miss="native")
def wait():
    while True:
        _C.wait_until_idle(0.0005)
for _ in range(8):
    threading.Thread(target=wait, daemon=True).start()
torch.var(torch.ones(3, 3), -1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(EAGERCACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=PACKAGE_ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
