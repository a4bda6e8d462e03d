"""How many workers run beside a program that uses its processors."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eagercache.service.pace import SAMPLE_SECONDS, Pace, physical_cores, thread_seconds
from eagercache.service.request_queue import RequestQueue
from eagercache.service.settings import ServiceSettings
from eagercache.service.workers import Workers
from eagercache.worker.inductor.compile import triton_compilers

pytestmark = pytest.mark.once  # clocks and processors


class Program:
    """A made-up process: its clock, and what its threads have had of a processor."""

    def __init__(self) -> None:
        self.now = 100.0
        self.seconds: dict[str, float] = {}

    def runs(self, shares: dict[str, float], passed: float = SAMPLE_SECONDS) -> None:
        """For so many seconds, with each thread on a processor for its share of them."""
        self.now += passed
        for name, share in shares.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + share * passed


def pace_of(program: Program, cores: int) -> Pace:
    return Pace(cores, lambda: program.now, lambda: dict(program.seconds))


@pytest.mark.parametrize(
    ("shares", "allowed"),
    [
        ({}, 16),
        ({"main": 1.0}, 15),
        ({"main": 1.0, "autograd": 0.4, "idle": 0.01}, 14),
        ({str(number): 0.3 for number in range(16)}, 1),  # a parallel region now and then
        ({str(number): 1.0 for number in range(40)}, 1),
    ],
)
def test_workers_get_the_processors_that_no_thread_of_the_program_uses(
    shares: dict[str, float], allowed: int
) -> None:
    program = Program()
    pace = pace_of(program, 16)
    assert pace.allowed() == 1  # nothing is known yet
    program.runs(shares)
    assert pace.allowed() == allowed


def test_what_is_allowed_follows_the_program() -> None:
    program = Program()
    pace = pace_of(program, 8)
    program.runs({"main": 1.0})
    assert pace.allowed() == 7
    program.runs({str(number): 0.5 for number in range(8)}, SAMPLE_SECONDS / 2)
    assert pace.allowed() == 7  # too short to be a sample
    program.runs({str(number): 0.5 for number in range(8)})
    assert pace.allowed() == 1
    program.runs({}, 10.0)
    assert pace.allowed() == 8


def test_threads_that_compute_are_counted() -> None:
    stop = threading.Event()
    data = bytes(1 << 20)

    def compute() -> None:
        while not stop.is_set():
            hashlib.sha256(data).digest()  # without the interpreter's lock

    threads = [threading.Thread(target=compute) for _ in range(3)]
    before = thread_seconds()
    for thread in threads:
        thread.start()
    try:
        wanted = {str(thread.native_id) for thread in threads}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = thread_seconds()
            if all(now.get(name, 0.0) > before.get(name, 0.0) + 0.02 for name in wanted):
                break
        assert wanted <= now.keys() and all(now[name] > 0.02 for name in wanted)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_siblings_are_one_core(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for number in mine:
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert physical_cores(tmp_path) == 1
    assert physical_cores(tmp_path / "none") == len(mine)
    assert thread_seconds(tmp_path / "none") == {}


def test_triton_compilers_are_no_more_than_what_is_allowed() -> None:
    assert [triton_compilers(count) for count in (1, 5, 64)] == [1, 5, 16]
    assert triton_compilers() == min(16, max(1, len(os.sched_getaffinity(0)) // 2))


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    # As many slots, too, as on such a machine: who finds none waits for two minutes.
    settings = ServiceSettings(str(tmp_path), "", slots=8, slots_folder=tmp_path / "slots")
    yield Workers(RequestQueue(settings))


def test_a_thread_serves_when_the_program_leaves_it_a_processor(workers: Any) -> None:
    program = Program()
    workers._pace = pace_of(program, 16)
    first = workers._wait_for_slot()
    assert workers._begin_serving() is False
    program.runs({"main": 1.0})
    second = workers._wait_for_slot()
    assert first is not None and second is not None and workers._most() == 8  # half the machine
    workers._release(first)
    workers._release(second)
    program.runs({str(number): 0.3 for number in range(16)})
    assert workers._begin_serving() is True and workers._begin_serving() is False


def test_who_says_how_many_workers_gets_them(tmp_path: Path) -> None:
    settings = ServiceSettings(str(tmp_path), "", workers=3, slots_folder=tmp_path / "slots")
    assert Workers(RequestQueue(settings))._most() == 3
