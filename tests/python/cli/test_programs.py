"""`eagercache run` and `record`: programs run unchanged, and their children; errors are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import PACKAGE_ROOT, clean_environment
from eagercache.calls import trace
from eagercache.cli import main as cli
from eagercache.cli import program

pytestmark = pytest.mark.once

# A script that says what it sees, and starts children in every way that Python has.
SCRIPT = """
import json, multiprocessing, os, runpy, subprocess, sys
import torch
import eagercache

def count(n):
    torch.sin(torch.ones(n))
    return eagercache.is_enabled()

if __name__ == "__main__":
    torch.cos(torch.ones(3))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(count, [4])
        pool.close()
        pool.join()  # a worker that is terminated writes nothing
    code = "import torch, eagercache; torch.exp(torch.ones(5)); print(eagercache.is_enabled())"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": os.path.basename(__file__),
        "main": sys.modules["__main__"].__dict__.get("count") is count,
        "spawned": spawned, "started": started.stdout.strip(), "stderr": started.stderr,
        "theirs": os.environ.get("SITECUSTOMIZE_RAN"), "enabled": eagercache.is_enabled(),
    }))
    sys.exit(7)
"""


def eagercache(
    *words: str, cache: Path, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagercache", *words],
        env=clean_environment(EAGERCACHE_DIR=str(cache), **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    return folder


def test_a_script_runs_as_ever_with_its_children_and_all_is_recorded(
    cache: Path, folder: Path
) -> None:
    # A sitecustomize of the environment's own is run as without us.
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(
        "import os; os.environ['SITECUSTOMIZE_RAN'] = str(os.getpid())"
    )
    path = os.pathsep.join([str(theirs), PACKAGE_ROOT])
    words = ["record", "trace", "--", "script.py", "--flag", "-m", "x"]
    done = eagercache(*words, cache=cache, folder=folder, PYTHONPATH=path)
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    assert said["argv"] == ["script.py", "--flag", "-m", "x"]
    assert (said["name"], said["file"], said["main"]) == ("__main__", "script.py", True)
    assert said["enabled"] and said["spawned"] == [True] and said["started"] == "True", said
    assert said["theirs"]
    recorded = trace.Trace()
    trace.read(folder / "trace", recorded)
    names = sorted(call.name for call in recorded.calls.values())
    assert names == ["aten::cos", "aten::exp", "aten::sin"]
    assert "3 calls recorded; trace holds 3 keys" in done.stderr

    # Once more, into the same file.
    again = eagercache(
        "record", "--append", "--json", "trace", "script.py", cache=cache, folder=folder
    )
    assert again.returncode == 7
    counted = json.loads(again.stderr[again.stderr.index("{") :])
    assert counted == {"calls": 3, "keys": 3, "sections": 3, "trace": "trace"}


def test_run_takes_modules_and_reports(cache: Path, folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text(
        "import sys, torch\n"
        "for _ in range(40): torch.sin(torch.ones(1000))\n"
        "print(sys.argv[1:], torch.sin(torch.zeros(1)).item())\n"
    )
    words = ["run", "--report", "--on-miss", "native", "-m", "package", "--report", "x"]
    done = eagercache(*words, cache=cache, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--report', 'x'] 0.0\n"
    assert "aten::sin" in done.stderr and "41" in done.stderr
    assert "cost: 0 compiles" in done.stderr
    (picture,) = folder.glob("eagercache-report-package-*-*.svg")
    assert f"picture: {picture.name}" in done.stderr
    assert "aten::sin" in picture.read_text()
    (page,) = folder.glob("eagercache-report-package-*-*.html")
    assert f"page: {page.name}" in done.stderr and page.stem == picture.stem
    assert "aten::sin" in page.read_text()


def test_run_enables_training_of_modules_when_told(cache: Path, folder: Path) -> None:
    (folder / "training.py").write_text(
        "import torch\nfrom eagercache.runtime.session import session\n"
        "print(session.configuration.training)\n"
    )
    words = ["run", "--on-miss", "native", "--modules", "auto"]
    for more, said in (["--training"], "True\n"), ([], "False\n"):
        done = eagercache(*words, *more, "training.py", cache=cache, folder=folder)
        assert (done.stdout, done.stderr) == (said, "")


def test_run_says_that_a_class_of_modules_does_not_exist(cache: Path, folder: Path) -> None:
    (folder / "model.py").write_text(
        "import torch\n"
        "class Block(torch.nn.Module):\n"
        "    def forward(self, x): return x\n"
        "Block()(torch.ones(1))\n"
    )
    words = ["run", "--on-miss", "native", "--modules"]
    done = eagercache(*words, "model.Blok", "model.py", cache=cache, folder=folder)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert "modules='model.Blok' chose nothing" in done.stderr
    assert "Did you mean __main__.Block?" in done.stderr
    done = eagercache(*words, "Block", "model.py", cache=cache, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_run_hands_signals_on_and_tells_how_the_program_ended(cache: Path, folder: Path) -> None:
    (folder / "waits.py").write_text(
        "import pathlib, signal, sys, time, torch\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(120)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-m", "eagercache", "run", "--report", "--json", "waits.py"],
        env=clean_environment(EAGERCACHE_DIR=str(cache)),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 9, stderr
    assert json.loads(stderr[stderr.index("{") :])["processes"] == 1


@pytest.mark.parametrize("options", [[], ["--report"], ["--modules", "auto"]])
def test_an_interrupt_that_nobody_handles_ends_the_program_as_natively(
    options: list[str], cache: Path, folder: Path
) -> None:
    # What is imported at exit made the interpreter forget it: the status was 1.
    (folder / "interrupted.py").write_text(
        "import os, signal, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's job ignores it
        "for _ in range(5): torch.var(torch.ones(5, 5), -1)\n"  # asked for, so left for later
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = eagercache("run", *options, "interrupted.py", cache=cache, folder=folder)
    assert done.returncode == -signal.SIGINT, done.stderr
    (folder / "handles.py").write_text(
        "import code, sys, torch\n"
        "torch.sin(torch.ones(3))\n"
        "code.InteractiveInterpreter().runsource('raise KeyboardInterrupt')\n"
        "assert sys.last_type is KeyboardInterrupt\n"  # a shell's: the program goes on
        "sys.exit(5)\n"
    )
    done = eagercache("run", *options, "handles.py", cache=cache, folder=folder)
    assert done.returncode == 5, done.stderr


def test_a_program_that_cannot_have_eagercache_runs_all_the_same(cache: Path, folder: Path) -> None:
    (folder / "plain.py").write_text("import torch; print(torch.sin(torch.zeros(1)).item())")
    cache.chmod(0o777)  # a store that others may write is refused
    done = eagercache("run", "plain.py", cache=cache, folder=folder)
    assert done.returncode == 0 and done.stdout == "0.0\n"
    assert "no kernel store can be used" in done.stderr


def test_a_program_without_torch_is_left_alone(folder: Path) -> None:
    (folder / "small.py").write_text(
        "import sys; print(sorted({'eagercache', 'torch', 'typing'} & set(sys.modules)))"
    )
    environ = program.environment_of(program.Settings(), clean_environment())
    code = program.run([sys.executable, str(folder / "small.py")], environ)
    assert code == 0
    done = subprocess.run(
        [sys.executable, str(folder / "small.py")],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.py"], "there is no program nothing.py"),
        (["run", "--op", "aten::nonsense", "script.py"], "there is no operator 'aten::nonsense'"),
        (["run", "--skip", "nonsense", "script.py"], "there is no operator"),
        (["run", "--training", "script.py"], "--training is about whole modules; say which"),
        (["run", "--page", "a.html", "script.py"], "--page and --picture are for --report"),
        (["record", "script.py", "--", "script.py"], "script.py exists and is no trace"),
        (["record", "no/folder/trace", "script.py"], "no/folder/trace cannot be written"),
        (["record", "trace", "--"], "there is no program"),
        (["record", "trace", "nothing.py"], "there is no program nothing.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.startswith("Error: ") and done.output.count("\n") == 1
    assert (folder / "script.py").read_text() == SCRIPT


def test_missing_arguments_and_unknown_values_are_exit_code_2() -> None:
    for arguments in (["run"], ["record", "trace"], ["run", "--on-miss", "never", "x.py"]):
        assert CliRunner().invoke(cli.main, arguments).exit_code == 2


def test_nothing_recorded_is_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("EAGERCACHE_ON_MISS", raising=False)
    (folder / "empty.py").write_text("print('here')")
    done = CliRunner().invoke(cli.main, ["record", "trace", "empty.py"])
    assert done.exit_code == 1
    assert "nothing was recorded" in done.output
    assert capfd.readouterr().out == "here\n"
