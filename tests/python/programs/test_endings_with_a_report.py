"""However a program begins, is fed and ends, `eagercache run --report` changes nothing of it.

What each prints, its errors and its end are as without us; the report comes after.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import clean_environment

pytestmark = [pytest.mark.once, pytest.mark.long]

WORK = """
import torch
for _ in range(20): y = torch.sin(torch.ones(64))
print(y.sum().item() > 0)
"""
PYTHON = sys.executable


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        words: how it is started; "PYTHON" stands for the interpreter.
        files: what lies in its folder.
        processes, forks, cut_off: what the report says of them; None where it is by chance.
        fed: its standard input.
        calls: of hooked operators, that the report has at least.
    """

    words: list[str]
    files: dict[str, str] = field(default_factory=dict)
    processes: int = 1
    forks: int = 0
    cut_off: int | None = 0
    fed: str = ""
    calls: int = 20


CASES = {
    "a pipeline of a shell": Case(
        ["bash", "-c", "PYTHON first.py 3 | PYTHON second.py; exit 4"],
        {
            "first.py": WORK + "import sys\nprint(*range(int(sys.argv[1])), sep='\\n')\n",
            "second.py": WORK + "import sys\nprint(sorted(sys.stdin.read().split()))\n",
        },
        processes=2,
        calls=40,
    ),
    "it leaves at once": Case(
        ["program.py"],
        {"program.py": WORK + "import os, sys\nsys.stdout.flush()\nos._exit(3)\n"},
    ),
    "it is ended by a signal": Case(
        ["program.py"],
        {
            "program.py": WORK + "import os, signal, sys, time\nsys.stdout.flush()\n"
            "time.sleep(2)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        },
        cut_off=1,
    ),
    "it aborts": Case(
        ["program.py"],
        {
            "program.py": "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
            + WORK
            + "import os, sys, time\nsys.stdout.flush()\ntime.sleep(2)\nos.abort()\n"
        },
        cut_off=1,
    ),
    "it reads standard input": Case(
        ["program.py"],
        {"program.py": WORK + "import sys\nfor line in sys.stdin: print(line.upper(), end='')\n"},
        fed="one\ntwo\nthree",
    ),
    "it is standard input": Case(["-", "argument"], fed=WORK + "import sys\nprint(sys.argv)\n"),
    "it is a text": Case(["-c", WORK + "import sys\nprint(sys.argv)\n", "-x", "--json"]),
    "it is a module": Case(
        ["-m", "package.part", "--report"],
        {"package/part.py": WORK + "import sys\nprint(__name__, sys.argv[1:])\n"},
    ),
    "it exits with a text": Case(
        ["program.py"], {"program.py": WORK + "import sys\nsys.exit('a text')\n"}
    ),
    "it warns and raises in a thread": Case(
        ["program.py"],
        {
            "program.py": "import threading, warnings\n" + WORK + "warnings.warn('look')\n"
            "one = threading.Thread(target=lambda: [][0])\none.start()\none.join()\n"
        },
    ),
    "a pool of spawned processes": Case(
        ["program.py"],
        {
            "program.py": "import multiprocessing, time, torch\n"
            "def work(n):\n    time.sleep(1)\n    return torch.sin(torch.ones(n)).dtype\n"
            "if __name__ == '__main__':\n"
            "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"  # terminated
            "        print(pool.map(work, [4, 5], chunksize=1))\n"
        },
        processes=3,
        cut_off=None,
        calls=0,  # what a process did last is not known where it was killed
    ),
    "workers that are forked": Case(
        ["program.py"],
        {
            "program.py": WORK + "from torch.utils.data import DataLoader\n"
            "if __name__ == '__main__':\n"
            "    for batch in DataLoader(list(range(8)), batch_size=4, num_workers=2):\n"
            "        print(batch.tolist())\n"
        },
        forks=2,
    ),
}


def run(words: list[str], case: Case, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    cache = str(folder.parent / "cache")
    return subprocess.run(
        [word.replace("PYTHON", PYTHON) for word in words],
        env=clean_environment(EAGERCACHE_DIR=cache, OMP_NUM_THREADS="1"),
        cwd=folder,
        input=case.fed,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def native_words(words: list[str]) -> list[str]:
    return words if words[0] == "bash" else ["PYTHON", *words]


REPORT = ["PYTHON", "-m", "eagercache", "run", "--report", "--json", "--on-miss", "native"]


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_as_without_a_report(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tmp_path / "work"
    native = run(native_words(case.words), case, folder)
    done = run([*REPORT, *case.words], case, folder)
    assert done.returncode == native.returncode, done.stderr
    assert done.stdout == native.stdout
    assert done.stderr.startswith(native.stderr), (native.stderr, done.stderr)
    report: dict[str, Any] = json.loads(done.stderr[len(native.stderr) :])
    assert (report["processes"], report["forks"]) == (case.processes, case.forks)
    assert case.cut_off in (report["cut_off"], None)
    assert report["total"]["calls"] >= case.calls
    assert Path(folder, report["page"]).is_file()


ANSWERS = """
import os, signal, sys, time, torch
torch.sin(torch.ones(64))
def note(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGHUP:
        sys.exit(6)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, note)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


def started(folder: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    """A program that waits for signals, and its process id."""
    (folder / "answers.py").write_text(ANSWERS)
    running = subprocess.Popen(
        [PYTHON, *words, "answers.py"],
        env=clean_environment(EAGERCACHE_DIR=str(folder / "cache")),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    return running, int(running.stdout.readline())


@pytest.mark.parametrize("last", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGALRM])
def test_signals_that_it_is_sent_reach_the_program(last: signal.Signals, tmp_path: Path) -> None:
    seen = []
    for words in ([], REPORT[1:]):
        running, _ = started(tmp_path, *words)
        assert running.stdout is not None
        lines = []
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            running.send_signal(number)
            lines.append(running.stdout.readline())
        time.sleep(3)  # a report of a program that is killed is one that was written before
        running.send_signal(last)
        rest, errors = running.communicate(timeout=240)
        seen.append((lines, rest, errors, running.returncode))
    native, reported = seen
    assert reported[:2] == native[:2] and reported[3] == native[3]
    assert native[0] == ["SIGUSR1\n", "SIGUSR2\n", "SIGQUIT\n"]
    assert reported[2].startswith(native[2])
    report = json.loads(reported[2][len(native[2]) :])
    assert report["processes"] == 1 and report["total"]["calls"] == 1


def test_the_program_is_killed_with_what_runs_it(tmp_path: Path) -> None:
    running, program = started(tmp_path, *REPORT[1:])
    running.kill()
    running.communicate(timeout=60)
    assert running.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(program, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the program goes on")
