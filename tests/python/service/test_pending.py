"""Requests that were open when their program ended: what is kept, what is believed, who goes on.

Whole programs are in test_lingering.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from eagercache import _C
from eagercache.base import environment
from eagercache.cli import main as cli
from eagercache.service import linger_main, lingering, machine, pending
from eagercache.service.pending import PendingFolder
from eagercache.service.pending_work import PendingWork
from eagercache.service.request import Request
from eagercache.service.settings import ServiceSettings

pytestmark = pytest.mark.once

HERE = "an environment"


def _digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def _request(
    number: int, *, calls: int = 1, crashes: int = 0, padding: int = 0, gpu: int | None = None
) -> Request:
    description = {
        "op": "aten::tanh",
        "overload": "",
        "dispatch_key": "CPU" if gpu is None else "CUDA",
        "digest": _digest(number),
        "calls": calls,
        "args": [],
        "payload": "x" * padding,
    }
    settings = ServiceSettings("nowhere", HERE, gpu=gpu)
    return Request(description, print, settings, 0.0, 0.0, number, 0.0, crashes=crashes)


@pytest.fixture
def folder(cache: Path) -> PendingFolder:
    """The folder of a store, with two requests."""
    made = PendingFolder(cache)
    assert made.write([_request(1), _request(2, calls=9, crashes=1)], HERE) == 2
    return made


def _files(folder: PendingFolder) -> list[Path]:
    return sorted(folder.path.glob("*.json"))


def test_what_is_left_is_private_and_read_again_by_its_environment_alone(
    folder: PendingFolder,
) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in _files(folder))
    most, least = folder.read(HERE)
    assert (most.digest, most.crashes, most.attempts) == (_digest(2), 1, 0)
    assert least.description == _request(1).description
    assert folder.read("another environment") == []
    assert folder.count(HERE) == (2, 2) and folder.count("another environment") == (0, 2)
    assert folder.write([_request(1)], HERE) == 1  # the same once more
    assert len(_files(folder)) == 2


def test_what_is_old_is_removed(folder: PendingFolder) -> None:
    old = time.time() - pending.EXPIRES_SECONDS - 60
    first, second = _files(folder)
    content = json.loads(first.read_text())
    first.write_text(json.dumps({**content, "created": old}))
    os.utime(second, (old, old))
    folder.write([_request(3)], HERE)  # looks at the times of files
    assert [one.digest for one in folder.read(HERE)] == [_digest(3)]  # and this at their content
    assert len(_files(folder)) == 1


def test_there_are_at_most_so_many_and_so_large_ones(
    folder: PendingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "WRITE_SECONDS", 10.0)
    monkeypatch.setattr(pending, "MOST_REQUESTS", 5)
    folder.write([_request(number) for number in range(10, 15)], HERE)
    assert {one.digest for one in folder.read(HERE)} == {_digest(n) for n in range(10, 15)}
    monkeypatch.setattr(pending, "MOST_REQUEST_BYTES", 2000)
    assert folder.write([_request(20, padding=3000)], HERE) == 0
    monkeypatch.setattr(pending, "MOST_BYTES", 4000)
    folder.write([_request(number, padding=1000) for number in range(30, 40)], HERE)
    assert sum(path.stat().st_size for path in _files(folder)) <= 4000


def test_a_program_that_ends_does_not_write_for_long(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "WRITE_SECONDS", 0.0)
    assert PendingFolder(cache).write([_request(1)], HERE) == 0


def _damages() -> dict[str, Any]:
    return {
        "garbage": b"\x00\xff{",
        "nested": b"[" * 100_000,
        "no object": b"[]",
        "another version": {"version": 1},
        "another name": {"description": {"digest": _digest(5), "op": "a", "dispatch_key": "CPU"}},
        "no description": {"description": None},
        "a policy": {"numerics": "wrong"},
        "a margin": {"margin": "nan"},
        "a time": {"created": float("inf")},
        "counts": {"crashes": -1},
        "attempts": {"attempts": pending.MOST_ATTEMPTS},
        "arguments": {"description": {"digest": "", "args": [{"kind": "tensor"}]}},
    }


@pytest.mark.parametrize("damage", _damages())
def test_a_damaged_file_is_removed(folder: PendingFolder, damage: str) -> None:
    path, content = _files(folder)[0], _damages()[damage]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    assert len(folder.read(HERE)) == 1
    assert len(_files(folder)) == 1


def test_what_others_may_have_put_there_is_not_read(folder: PendingFolder, tmp_path: Path) -> None:
    first, second = _files(folder)
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(first, elsewhere)
    first.unlink()
    first.symlink_to(elsewhere)
    second.chmod(0o666)
    assert folder.read(HERE) == []
    assert elsewhere.exists() and not first.is_symlink()
    folder.write([_request(3)], HERE)
    huge = _files(folder)[0]
    os.truncate(huge, pending.MOST_REQUEST_BYTES + 1)
    assert folder.read(HERE) == []
    os.mkfifo(huge)
    assert folder.read(HERE) == []
    folder.write([_request(4)], HERE)
    for mode in (0o770, 0o755, 0o702):
        folder.path.chmod(mode)
        assert folder.read(HERE) == [] and folder.write([_request(5)], HERE) == 0
    folder.path.chmod(0o700)
    assert len(folder.read(HERE)) == 1


def test_a_folder_that_is_a_link_is_not_used(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (cache / "PENDING").symlink_to(tmp_path / "other")
    assert PendingFolder(cache).write([_request(1)], HERE) == 0
    assert list((tmp_path / "other").iterdir()) == []


# ---- going on ------------------------------------------------------------------------------------


class _Service:
    """Answers as it is told, at once; None: never."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []
        self.open = 0

    def reconfigure(self, **_: Any) -> None:
        """Nothing depends on it."""

    def submit(self, description: dict[str, Any], on_done: Any, *, crashes: int = 0) -> None:
        self.asked.append((description["digest"], crashes))
        if self.answer:
            on_done(self.answer)
        else:
            self.open += 1

    def wait(self, timeout: float) -> bool:
        return self.open == 0

    def worker_groups(self) -> set[int]:
        """It has no workers."""
        return set()

    def close(self) -> None:
        """Nothing is under way."""


class _Store:
    def __init__(self, *known: int) -> None:
        self.known = {_digest(number) for number in known}

    def find(self, digest: str) -> Any:
        return {} if digest in self.known else None


def _go(folder: PendingFolder, service: Any, store: _Store | None = None) -> PendingWork:
    work = PendingWork(folder, HERE, store or _Store(), lambda gpu: service)
    work.run(lambda left: left[:1], lambda: True)
    return work


def test_what_is_answered_is_forgotten(folder: PendingFolder) -> None:
    service = _Service(verdict="failed", failure="deterministic", reason="it crashed")
    work = _go(folder, service)
    assert service.asked == [(_digest(2), 1), (_digest(1), 0)]  # crashes of the program count
    assert [one.verdict for one in work.outcomes] == ["failed", "failed"]
    assert _files(folder) == []


def test_what_the_store_has_by_now_is_not_compiled(folder: PendingFolder) -> None:
    service = _Service(verdict="kernel")
    _go(folder, service, _Store(1, 2))
    assert service.asked == [] and _files(folder) == []


def test_trouble_of_the_machine_is_tried_once_more_and_no_more(folder: PendingFolder) -> None:
    trouble = _Service(verdict="failed", failure="transient", reason="no memory")
    _go(folder, trouble)
    assert [one.attempts for one in folder.read(HERE)] == [1, 1]
    _go(folder, trouble)
    assert len(trouble.asked) == 4 and _files(folder) == []


@pytest.mark.parametrize(("asked", "attempts"), [(True, 0), (False, 1)])
def test_what_was_begun_counts_unless_somebody_ended_it(
    folder: PendingFolder, asked: bool, attempts: int
) -> None:
    work = _go(folder, _Service())
    work.close(asked=asked)
    assert sorted(one.attempts for one in folder.read(HERE)) == [0, attempts]


# ---- the process ---------------------------------------------------------------------------------


@pytest.fixture
def sleeper(folder: PendingFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The root of a store whose lingering process only sleeps."""
    monkeypatch.setattr(lingering, "COMMAND", ("-c", "import time; time.sleep(60)"))
    yield folder.path.parent
    assert lingering.stop(folder.path.parent)


def _settings(root: Path) -> ServiceSettings:
    return ServiceSettings(str(root), HERE)


def test_one_process_lingers_for_a_store_and_can_be_ended(sleeper: Path) -> None:
    assert lingering.running(sleeper) is None
    with ThreadPoolExecutor(8) as together:
        started = list(together.map(lambda _: lingering.start(_settings(sleeper), 60), range(8)))
    (pid,) = [one for one in started if one is not None]
    found = lingering.running(sleeper)
    assert found is not None and found.pid == pid
    assert os.getsid(pid) == pid and Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    for number in (0, 1, 2):
        assert Path(f"/proc/{pid}/fd/{number}").resolve() == Path(os.devnull)
    assert lingering.stop(sleeper)
    os.waitpid(pid, 0)
    assert lingering.running(sleeper) is None


def test_a_number_that_is_another_processes_is_left_alone(sleeper: Path) -> None:
    pid = lingering.start(_settings(sleeper), 60)
    assert pid is not None
    with subprocess.Popen(["sleep", "60"]) as other:
        status = {"pid": other.pid, "born": "1 another boot", "does": "nothing"}
        (sleeper / "PENDING" / lingering.STATUS).write_text(json.dumps(status))
        assert lingering.running(sleeper) == lingering.Lingering(0, "starts")
        assert not lingering.stop(sleeper, timeout=0.2)
        assert other.poll() is None
        other.kill()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lingering.running(sleeper) is None


def test_clear_ends_the_process_and_stats_shows_it(
    sleeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _C.Store(str(sleeper), environment.environment_text(cxx=None))
    pid = lingering.start(_settings(sleeper), 60)
    run = CliRunner().invoke
    seen = json.loads(run(cli.main, ["stats", "--dir", str(sleeper), "--json"]).output)
    assert seen["pending"] == {"here": 0, "elsewhere": 2}
    assert seen["lingering"] == {"pid": pid, "does": "starts"}
    said = run(cli.main, ["stats", "--dir", str(sleeper)]).output
    assert f"process {pid} goes on with them: starts" in said and "2 requests of programs" in said
    done = run(cli.main, ["clear", "--dir", str(sleeper), "--yes"])
    assert done.exit_code == 0, done.output
    assert pid is not None
    os.waitpid(pid, 0)
    assert list(sleeper.iterdir()) == []


def _choice(
    folder: PendingFolder, monkeypatch: pytest.MonkeyPatch, free: int, busy: float
) -> tuple[list[str], str]:
    """What a lingering process goes on with, or rests without, and what it says it does."""
    monkeypatch.setattr(linger_main, "free_bytes", lambda: free)
    monkeypatch.setattr(linger_main, "busy_share", lambda seconds: busy)
    root, end = str(folder.path.parent), time.monotonic() + 600
    lingerer = linger_main.Lingerer(root, end, 0, whatever_the_load=False)

    def rests(_: PendingWork) -> None:
        lingerer._end = 0.0

    monkeypatch.setattr(lingerer, "_rest", rests)
    service: Any = _Service()
    work = PendingWork(folder, HERE, _Store(), lambda gpu: service)
    return [one.digest for one in lingerer._choose(work, work.left())], lingerer._said


@pytest.mark.parametrize(
    ("free", "busy", "begins", "said"),
    [
        (8 << 30, 0.1, True, "compiles: 0 of 2 requests done"),
        (8 << 30, 0.9, False, "waits for an idle machine"),
        (1 << 30, 0.1, False, ""),
    ],
)
def test_it_begins_on_an_idle_machine_with_free_memory(
    folder: PendingFolder,
    free: int,
    busy: float,
    begins: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [_digest(2), _digest(1)] if begins else []
    assert _choice(folder, monkeypatch, free, busy) == (expected, said)


def test_what_is_in_use_can_be_told() -> None:
    assert 0.0 <= machine.busy_share(0.1) <= 1.0
    assert 1 << 20 < machine.free_bytes() < 1 << 60
