"""The import beside a torch that nobody has tried: what is said, checked, kept and left native.

What the checks find is torch's own matter; what becomes of it is the same with each (`once`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, clean_environment, run_program, run_python
from eagercache.base import torch_versions, untried_torch
from launcher import Finished

TRIED = "TRIED = ("
BEGUN = "Its self-check there runs beside the program; everything stays native until it has passed."
PASSED = "Its self-check there passed."
# What is found is waited for, where nothing has found it before.
PROGRAM = """
import torch, eagercache
eagercache.enable(["var.correction"], on_miss="native")
eagercache.wait()
x = torch.ones(3, 3)
for _ in range(3): torch.var(x, -1)
print(eagercache.available(), torch.var(x, -1).sum().item(), eagercache.stats().misses > 0)
"""
SAYS = "import json; print(json.dumps({{'problem': {problem!r}, 'lasting': {lasting}}}))"
WAITS = """
import os, time
open({started!r}, "w").write(str(os.getpid()))
while not os.path.exists({go!r}): time.sleep(0.02)
"""


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


def wait_for_go(package: Path) -> tuple[Path, Path]:
    """The self-check waits for a file, and passes: that file, and one with its process's number."""
    go, started = package.parent / "go", package.parent / "started"
    passes = SAYS.format(problem="", lasting=True)
    check(package, WAITS.format(started=str(started), go=str(go)) + passes)
    return go, started


def checks(package: Path) -> int:
    """How often the self-check ran."""
    mark = package.parent / "mark"
    return len(mark.read_text()) if mark.exists() else 0


def variables(package: Path, **others: str) -> dict[str, str]:
    store = {"EAGERCACHE_DIR": str(package.parent.parent / "store")}
    return clean_environment(**{**store, **others, "PYTHONPATH": str(package.parent)})


def run(package: Path, code: str = PROGRAM, **others: str) -> Finished:
    """Runs a program, forked from a process that has torch, beside that package."""
    path = str(package.parent)
    first = f"import os, sys\nsys.path.insert(0, {path!r})\nos.environ['PYTHONPATH'] = {path!r}\n"
    environment = {**variables(package, **others), "PYTHONPATH": PACKAGE_ROOT}
    return run_python(first + code, environment, folder=package.parent, timeout=700)


def kept(package: Path) -> list[str]:
    """The verdicts in the store."""
    file = package.parent.parent / "store" / untried_torch.NAME
    return list(json.loads(file.read_text()).values()) if file.exists() else []


def comes(what: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether something is so within that time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_hooks_a_kernel_and_a_module_are_tried_and_the_program_goes_on(untried: Path) -> None:
    shutil.copy(Path(PACKAGE_ROOT, "eagercache/base/self_check.py"), untried / "base")
    done = run(untried)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True 0.0 True\n", done.stderr
    assert "eagercache was tried with torch 2.9.7, and not with 2." in done.stderr
    assert done.stderr.index(BEGUN) < done.stderr.index(PASSED)
    assert kept(untried) == [""]


@pytest.mark.once
def test_the_import_waits_for_none_of_it_and_until_then_all_is_native(untried: Path) -> None:
    go, _ = wait_for_go(untried)
    code = f"""
import time, torch
began = time.monotonic()
import eagercache
print(time.monotonic() - began)
eagercache.enable(["var.correction"], on_miss="native")
x = torch.ones(3, 3)
for _ in range(3): torch.var(x, -1)
print(eagercache.available(), eagercache.is_enabled(), eagercache.stats().operators)
print(eagercache.wait(0.1), "has not passed yet" in str(eagercache.explain(torch.var, x)))
open({str(go)!r}, "w").close()
print(eagercache.wait(), eagercache.is_enabled())
torch.var(x, -1)
print(eagercache.stats().misses)
"""
    done = run(untried, code)
    seconds, *said = done.stdout.split("\n")
    # A check that is waited for would never end.
    assert said == ["True False {}", "False True", "True True", "1", ""], done.stderr
    assert float(seconds) < 20, "of a busy machine; it is some 0.2 s"


@pytest.mark.once
def test_what_the_check_found_is_kept_for_this_torch_and_module(untried: Path) -> None:
    for begun in (True, False):
        done = run(untried)
        assert done.stdout == "True 0.0 True\n" and PASSED in done.stderr, done.stderr
        assert (BEGUN in done.stderr) == begun
    assert checks(untried) == 1
    info = untried / "_build_info.py"
    info.write_text(info.read_text().replace('REVISION = "', 'REVISION = "another'))
    assert PASSED in run(untried).stderr
    assert checks(untried) == 2


@pytest.mark.once
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "it was ended by signal 6"),
        ("raise RuntimeError('no such operator')", "RuntimeError: no such operator"),
        (SAYS.format(problem="an answer differs", lasting=True), "an answer differs"),
    ],
)
def test_where_the_check_fails_all_stays_native_and_a_line_says_so(
    untried: Path, code: str, reason: str
) -> None:
    check(untried, code)
    for begun in (True, False):
        done = run(untried)
        assert (done.returncode, done.stdout) == (0, "False 0.0 False\n"), done.stderr
        said = [line for line in done.stderr.splitlines() if "self-check there" in line]
        end = f"Its self-check there failed: {reason}. Everything stays native."
        assert len(said) == 1 + begun and said[-1].endswith(end), done.stderr
    assert checks(untried) == 1 and kept(untried) == [reason]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "its hooks ended by signal 6"),
        ("import os; os._exit(3)", "its hooks ended the process"),
        ("raise ImportError('undefined symbol')", "ImportError: undefined symbol"),
        (
            "def register(*names): pass\ndef set_active(*names): pass",
            "no hook saw a call of aten::var, aten::add, aten::mul_",
        ),
        (
            "import torch\ndef set_answering(on):\n torch.var = torch.sum\n return True",
            "an answer through a hook differs from native's",
        ),
    ],
)
def test_an_extension_that_does_not_fit_is_found_before_the_program_has_it(
    untried: Path, code: str, reason: str
) -> None:
    (module,) = untried.glob("_C.*.so")
    module.rename(untried / module.name.replace("_C.", "_real."))
    (untried / "_C.py").write_text(REAL + code)
    done = run(untried)
    assert (done.returncode, done.stdout) == (0, "False 0.0 False\n"), done.stderr
    assert f"failed: {reason}. Everything stays native." in done.stderr
    assert checks(untried) == 0 and kept(untried) == [reason]


# A module in whose place another one stands: all of it, but for what is changed below.
REAL = """
import importlib.machinery, importlib.util, pathlib
_file = next(pathlib.Path(__file__).parent.glob("_real.*.so"))
_loader = importlib.machinery.ExtensionFileLoader("eagercache._C", str(_file))
_real = importlib.util.module_from_spec(importlib.util.spec_from_loader("eagercache._C", _loader))
_loader.exec_module(_real)
globals().update({k: v for k, v in vars(_real).items() if not k.startswith("__")})
"""


@pytest.mark.once
def test_a_copy_that_does_not_end_is_ended_and_nothing_is_kept(untried: Path) -> None:
    quick = untried / "base" / "untried" / "quick_check.py"
    quick.write_text(quick.read_text().replace("LIMIT_S = 5.0", "LIMIT_S = 0.3"))
    (untried / "_C.py").write_text("import time; time.sleep(1000)")
    for module in untried.glob("_C.*.so"):
        module.unlink()
    done = run(untried)
    assert done.stdout == "False 0.0 False\n", done.stderr
    assert "its hooks did not answer within 0 s" in done.stderr
    assert kept(untried) == []


@pytest.mark.once
def test_what_may_pass_is_not_kept(untried: Path) -> None:
    check(untried, SAYS.format(problem="no memory", lasting=False))
    for count in (1, 2):
        assert "no memory" in run(untried).stderr
        assert checks(untried) == count


@pytest.mark.once
def test_a_verdict_that_others_may_have_written_is_not_believed(untried: Path) -> None:
    run(untried)
    (untried.parent.parent / "store" / untried_torch.NAME).chmod(0o666)
    assert PASSED in run(untried).stderr
    assert checks(untried) == 2


@pytest.mark.once
def test_workers_and_commands_check_nothing(untried: Path) -> None:
    assert "was tried" not in run(untried, EAGERCACHE_INSIDE_WORKER="1").stderr
    doctor = subprocess.run(
        [sys.executable, "-m", "eagercache", "doctor"],
        env=variables(untried), cwd=untried.parent, capture_output=True, text=True, timeout=700,
        check=False,
    )  # fmt: skip
    assert "eagercache was tried with torch 2.9.7, and not with 2." in " ".join(
        doctor.stdout.split()
    )
    assert checks(untried) == 0


@pytest.mark.once
def test_where_the_store_cannot_be_made_each_process_checks(untried: Path) -> None:
    (untried.parent / "file").touch()
    store = str(untried.parent / "file" / "store")
    code = "import eagercache; eagercache.wait()"
    for count in (1, 2):
        assert PASSED in run(untried, code, EAGERCACHE_DIR=store).stderr
        assert checks(untried) == count


@pytest.mark.once
def test_of_programs_that_start_together_one_checks(untried: Path) -> None:
    go, started = wait_for_go(untried)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=variables(untried), cwd=untried.parent,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert comes(started.exists)
    time.sleep(1)
    go.touch()
    said = [program.communicate(timeout=120) for program in both]
    assert [output for output, _ in said] == ["True 0.0 True\n"] * 2, said
    assert all(PASSED in errors for _, errors in said)
    assert checks(untried) == 1


@pytest.mark.once
@pytest.mark.parametrize("linger", ["60", "0"])
def test_a_program_that_ends_first_leaves_the_check_unless_nothing_may_be_left(
    untried: Path, linger: str
) -> None:
    go, started = wait_for_go(untried)
    code = (
        f"import os, time, eagercache\nwhile not os.path.exists({str(started)!r}): time.sleep(0.1)"
    )
    assert run(untried, code, EAGERCACHE_LINGER=linger).returncode == 0
    number = int(started.read_text())
    if linger == "0":
        assert comes(lambda: not running(number))
    else:
        assert running(number)
    go.touch()
    assert comes(lambda: kept(untried) == [""], 60 if linger != "0" else 1) == (linger != "0")


def running(number: int) -> bool:
    """Whether there is a process of that number that has not ended."""
    try:
        return ") Z" not in Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False


@pytest.mark.once
def test_the_check_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untried_torch, "LIMIT_S", 0.01)
    problem, lasting = untried_torch.whole_check()
    assert "did not end within" in problem and not lasting


def test_the_copy_of_a_process_that_fits_finds_nothing_wrong(cache: Path) -> None:
    # In a process of its own, as at an import: other tests leave threads, which a copy has not.
    found = run_program(
        """
import torch
from eagercache.base.untried import quick_check
quick_check.LIMIT_S = 100.0
report(found=quick_check.problem())
""",
        cache,
    )
    assert found["found"] == ["", True]


def test_pre_releases_and_later_minors_are_untried() -> None:
    newest = torch_versions.TRIED[-1].torch
    assert torch_versions.is_tried(newest)
    for version in (f"{newest}rc1", f"{newest}.dev20261101+cpu", "2.99.0"):
        assert not torch_versions.is_tried(version)
        assert untried_torch.remark(version).endswith(f"{newest}, and not with {version}")
