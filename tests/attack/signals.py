"""Processes that are killed, stopped and interrupted at random stages of a compile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from attack.arena import VICTIM, Arena, Ran, Row, Started, children, files_left, permanent_failures

_AT_ONCE = 15.0  # seconds to an end, on a busy machine: the call would wait longer for its kernel
_SPAN = 6.0  # seconds from a worker's start, in which a compile passes through its stages


def _hit(arena: Arena, started: Started, number: int, *, whom: str) -> bool:
    """Sends a signal to a worker, a program, or both, at a random moment of its compile."""
    worker = started.worker(60.0)
    if worker is None:
        return False
    time.sleep(arena.random.random() * _SPAN)
    pids = {"worker": [worker], "program": [started.process.pid]}.get(
        whom, [worker, started.process.pid]
    )
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return True


def _again(arena: Arena, row: Row, store: Path) -> None:
    """The next program on that store has right answers, and nothing of the last one is left."""
    row.count(arena.fork(VICTIM, store, "wait", "2", workers=True))
    row.permanent += permanent_failures(store)
    row.leftovers += files_left(arena, store)


def _rounds(arena: Arena, row: Row, number: int, whom: str, count: int) -> Row:
    with arena.watching(row):
        for _ in range(count):
            store = arena.new_store()
            started = arena.start(VICTIM, store, "wait", "1", EAGERCACHE_WAIT_SECONDS="4")
            missed = not _hit(arena, started, number, whom=whom)
            row.note = row.note or ("no worker was met" if missed else "")
            ran = started.finish(180.0)
            if whom == "worker":
                row.count(ran)
            else:
                row.tried += 1
                row.hangs += ran.hung
            row.leftovers += _left_below(arena)
            _again(arena, row, store)
    return row


def _left_below(arena: Arena, seconds: float = 6.0) -> int:
    """Workers whose program is gone, after a while; they are ended."""
    end = time.monotonic() + seconds
    while (left := _orphans()) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def _orphans() -> list[int]:
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"eagercache.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def killed_workers(arena: Arena) -> Row:
    """SIGKILL to a worker: its calls are native's, and it is no verdict."""
    row = Row("SIGKILL to a worker in a compile")
    return _rounds(arena, row, signal.SIGKILL, "worker", 1 if arena.quick else 40)


def stopped_workers(arena: Arena) -> Row:
    """SIGSTOP to a worker: the call ends by itself."""
    row = Row("SIGSTOP to a worker in a compile")
    return _rounds(arena, row, signal.SIGSTOP, "worker", 1 if arena.quick else 20)


def killed_programs(arena: Arena) -> Row:
    """SIGKILL to the program: its workers go, and its files."""
    row = Row("SIGKILL to a program that compiles")
    return _rounds(arena, row, signal.SIGKILL, "program", 1 if arena.quick else 40)


_STOPPED_ORPHAN = "SIGSTOP to a worker, SIGKILL to its program"


def orphans_that_are_stopped(arena: Arena) -> Row:
    """A worker that is stopped when its program dies is ended all the same."""
    row = Row(_STOPPED_ORPHAN)
    if arena.quick:
        row.note = "not in the quick form"
        return row
    with arena.watching(row):
        for _ in range(10):
            store = arena.new_store()
            started = arena.start(VICTIM, store, "wait", "1")
            if _hit(arena, started, signal.SIGSTOP, whom="worker"):
                started.process.kill()
            row.tried += 1
            started.finish(180.0)
            row.leftovers += _left_below(arena)
    return row


def interrupts(arena: Arena) -> Row:
    """Ctrl-C while a call waits for its kernel: the program ends at once."""
    row = Row("Ctrl-C anywhere")
    body = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + VICTIM
    with arena.watching(row):
        for _ in range(2 if arena.quick else 60):
            store = arena.new_store()
            started = arena.start(body, store, "wait", "1", prepared=True)
            time.sleep(1.5 + arena.random.random() * 5.0)
            os.kill(started.process.pid, signal.SIGINT)
            asked = time.monotonic()
            ran = started.finish(60.0)
            row.tried += 1
            row.hangs += ran.hung or time.monotonic() - asked > _AT_ONCE
            row.wrong += ran.report.get("right") is False
            row.died += not _ended_well(ran)
            if row.findings():
                row.note = row.note or ran.in_words()
    return row


def _ended_well(ran: Ran) -> bool:
    return ran.code in (0, 1, 130, -signal.SIGINT) and (
        ran.code == 0 or "KeyboardInterrupt" in ran.stderr or ran.code == -signal.SIGINT
    )


SCENES = (killed_workers, stopped_workers, killed_programs, orphans_that_are_stopped, interrupts)
