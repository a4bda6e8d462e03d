"""One run of a program, measured from outside: time, lines as they come, memory of its processes.

What a process knows best itself (its peak, a GPU's) it writes down at its end; see
`_site/sitecustomize.py`. Processes that end otherwise are known by samples alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from eagercache.cli import program
from eagercache.cli.progress_bars import BarReader

# Between looks at /proc: a look costs less than a millisecond.
_SAMPLE_SECONDS = 0.2
# Of a program that prints without end the rest is only counted.
MOST_LINES = 200_000
_ERROR_BYTES = 1 << 16

_PR_SET_CHILD_SUBREAPER = 36
# In the environment of compile workers.
_WORKER_MARK = b"EAGERCACHE_INSIDE_WORKER="
# An argument of the process that goes on with what a program asked for; it has no such mark.
_LINGERING = b"eagercache.service.linger_main"


@dataclass
class Run:
    """What was seen of one run.

    Attributes:
        seconds: from its start to its end.
        code: its exit status, 128 + N when signal N ended it.
        lines: what it printed on standard output, without the ends of lines.
        times: when each line came, in seconds after the start.
        errors: the end of what it printed on standard error.
        steps: (steps done, seconds), of progress bars there.
        program_bytes: most memory of the program's own processes together.
        worker_bytes: the same of compile workers and their compilers, 0 where none was seen.
        gpu_bytes: most memory that PyTorch had allocated on GPUs; None where none was used.
        notes: what each process that ended in order wrote down.
        workers_left: whether workers were still there after the longest wait.
    """

    seconds: float = 0.0
    code: int = 0
    lines: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    errors: str = ""
    steps: list[tuple[int, float]] = field(default_factory=list)
    program_bytes: int = 0
    worker_bytes: int = 0
    gpu_bytes: int | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    workers_left: bool = False


def measured(
    command: Sequence[str],
    settings: program.Settings,
    environ: Mapping[str, str],
    *,
    text: bytes = b"",
    settle: float = 0.0,
) -> Run:
    """Runs a command to its end, and waits up to ``settle`` seconds until its workers are gone.

    ``text`` is the program's standard input. Raises OSError when the command cannot be started. A
    program that is under way when this is left by an exception is killed.
    """
    run = Run()
    with tempfile.TemporaryDirectory(prefix="eagercache-compare-") as folder, _adopting():
        variables = program.environment_of(replace(settings, measure=folder), environ)
        variables["PYTHONUNBUFFERED"] = "1"  # lines come when they are printed, on both sides
        before = set(_children(os.getpid()))
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE if text else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            memory = _follow(process, run, began, text, before)
            run.workers_left = not _wait_for_workers(before, memory, settle)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        run.notes = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    memory.take_notes(run.notes)
    run.program_bytes, run.worker_bytes = memory.program, memory.workers
    gpu = [note["gpu_bytes"] for note in run.notes if note.get("gpu_bytes") is not None]
    run.gpu_bytes = sum(gpu) if gpu else None
    return run


def _follow(
    process: subprocess.Popen[bytes], run: Run, began: float, text: bytes, before: set[int]
) -> _Memory:
    assert process.stdout is not None
    assert process.stderr is not None
    errors, bars = bytearray(), BarReader()
    readers = [
        threading.Thread(target=_read_lines, args=(process.stdout, run, began), daemon=True),
        threading.Thread(target=_read_end, args=(process.stderr, errors, bars, began), daemon=True),
    ]
    if text:
        readers.append(threading.Thread(target=_feed, args=(process, text), daemon=True))
    for reader in readers:
        reader.start()
    memory = _Memory(process.pid)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            memory.look(before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = process.wait()
        run.seconds = time.monotonic() - began
        for reader in readers:  # a child that lives on, and is watched, may hold the other end
            reader.join(2.0)
    finally:
        done.set()
        watcher.join()
    run.code = code if code >= 0 else 128 - code
    run.errors, run.steps = errors.decode(errors="replace"), bars.steps
    return memory


def _read_lines(stream: IO[bytes], run: Run, began: float) -> None:
    for raw in stream:
        if len(run.lines) < MOST_LINES:
            run.times.append(time.monotonic() - began)
            run.lines.append(raw.decode(errors="replace").rstrip("\r\n"))


def _read_end(stream: IO[bytes], kept: bytearray, bars: BarReader, began: float) -> None:
    while piece := os.read(stream.fileno(), 1 << 14):
        bars.feed(piece, time.monotonic() - began)
        kept += piece
        del kept[:-_ERROR_BYTES]


def _feed(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as stream:  # it need not read all
        stream.write(text)


# ---- processes ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Has processes whose parents end become children of this one, where they can be found."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it is gone, or the kernel keeps no such lists
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.extend(map(int, (thread / "children").read_text().split()))
    return found


def _descendants(before: set[int]) -> Iterator[tuple[int, bool]]:
    """All processes below this one but those of ``before``, and whether each is a worker's.

    Compilers have an environment without the mark: they are known by what is above them.
    """
    left = [(pid, False) for pid in _children(os.getpid()) if pid not in before]
    while left:
        pid, below = left.pop()
        works = below or _is_worker(pid)
        yield pid, works
        left.extend((child, works) for child in _children(pid))


def _is_worker(pid: int) -> bool:
    """Whether it is a compile worker, or the process that goes on with a program's requests."""
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
        return _LINGERING in words or _WORKER_MARK in (folder / "environ").read_bytes()
    except OSError:
        return False


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _kilobytes(status: Mapping[str, str], name: str) -> int:
    return int(status.get(name, "0").split()[0]) * 1024


class _Memory:
    """The most memory that was seen: of the program's processes, and of workers.

    A process counts from the second look on that finds it: one that is about to become another
    program still has the memory of its parent.
    """

    def __init__(self, first: int) -> None:
        self.program = 0
        self.workers = 0
        self._first = first
        self._seen: set[int] = set()

    def look(self, before: set[int]) -> bool:
        """Takes a sample; whether there is a worker. Reaps orphans that have ended."""
        own: list[dict[str, str]] = []
        workers = 0
        found = False
        seen, self._seen = self._seen, set()
        for pid, works in _descendants(before):
            status = _status(pid)
            self._seen.add(pid)
            if status.get("State", "").split()[:1] == ["Z"]:
                self._reap(pid, status)
            elif works:
                found = True
                workers += _kilobytes(status, "VmRSS") if pid in seen else 0
            elif pid in seen:
                own.append(status)
        # Of a single process the kernel keeps the peak between the looks too.
        peak = "VmHWM" if len(own) == 1 else "VmRSS"
        self.program = max(self.program, sum(_kilobytes(status, peak) for status in own))
        self.workers = max(self.workers, workers)
        return found

    def _reap(self, pid: int, status: Mapping[str, str]) -> None:
        # The program itself is its Popen's to wait for.
        if pid != self._first and int(status["PPid"]) == os.getpid():
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def take_notes(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Takes the peaks that processes wrote down themselves."""
        self.program = max([self.program, *(int(note.get("peak_bytes", 0)) for note in notes)])


def _wait_for_workers(before: set[int], memory: _Memory, seconds: float) -> bool:
    """Whether no worker is left, after so many seconds at the latest."""
    end = time.monotonic() + seconds
    while memory.look(before):
        if time.monotonic() >= end:
            return False
        time.sleep(_SAMPLE_SECONDS)
    return True
