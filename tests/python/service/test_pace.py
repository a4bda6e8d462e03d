"""How many workers run beside a program that uses its processors."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eagercache.service.pace import (
    SAMPLE_SECONDS,
    Pace,
    cpu_quota,
    physical_cores,
    spare_seconds,
    thread_seconds,
)
from eagercache.service.request import Request
from eagercache.service.request_queue import RequestQueue
from eagercache.service.settings import ServiceSettings
from eagercache.service.workers import Workers
from eagercache.worker.inductor.compile import triton_compilers
from eagercache.worker.main import _processors

pytestmark = pytest.mark.once  # clocks and processors


class Program:
    """A made-up process: its clock, and what its threads have had of a processor."""

    def __init__(self) -> None:
        self.now = 100.0
        self.seconds: dict[str, float] = {}
        self.spare = 0.0

    def runs(self, shares: dict[str, float], passed: float = SAMPLE_SECONDS) -> None:
        """For so many seconds, with each thread on a processor for its share of them."""
        self.now += passed
        for name, share in shares.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + share * passed


def pace_of(program: Program, cores: int, quota: float | None = None) -> Pace:
    return Pace(
        cores,
        lambda: program.now,
        lambda: dict(program.seconds),
        spare=lambda: program.spare,
        quota=quota,
    )


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


def test_there_is_room_while_a_processor_is_left_over() -> None:
    program = Program()
    pace = pace_of(program, 16)
    assert pace.has_room()  # taken for granted
    program.runs({"main": 1.0})
    program.spare += 1.0  # one is not at any time
    assert not pace.has_room()
    program.runs({"main": 1.0})
    program.spare += 1.6
    assert pace.has_room()


@pytest.mark.parametrize(
    ("shares", "allowed"),
    [
        ({}, 4),
        ({"main": 1.0}, 3),
        ({str(number): 0.5 for number in range(6)}, 1),
        ({str(number): 1.0 for number in range(4)}, 0),
    ],
)
def test_a_quota_is_what_there_is_and_who_uses_it_up_has_no_worker_beside_it(
    shares: dict[str, float], allowed: int
) -> None:
    program = Program()
    pace = pace_of(program, 64, quota=4.5)
    program.runs(shares)
    assert pace.allowed() == allowed


def test_quotas_of_both_kinds_of_control_groups_are_read(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "root"
    own.write_text("0::/a/b\n")
    folder = root / "a" / "b"
    folder.mkdir(parents=True)
    assert cpu_quota(own, root) is None and cpu_quota(tmp_path / "none", root) is None
    (folder / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(own, root) is None
    (folder.parent / "cpu.max").write_text("250000 100000\n")  # of the group above
    assert cpu_quota(own, root) == 2.5
    own.write_text("0::/../elsewhere\n")  # what a container may see of its own
    (root / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(own, root) == 1.5
    own.write_text("5:memory:/m\n4:cpu,cpuacct:/c\n")
    first = root / "cpu,cpuacct" / "c"
    first.mkdir(parents=True)
    (first / "cpu.cfs_period_us").write_text("100000\n")
    (first / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(own, root) is None
    (first / "cpu.cfs_quota_us").write_text("300000\n")
    assert cpu_quota(own, root) == 3.0


@pytest.mark.parametrize(("nice", "spare"), [(0, 9.0), (-5, 9.0), (5, 7.0)])
def test_spare_is_what_is_idle_and_what_is_nicer_than_this(
    tmp_path: Path, nice: int, spare: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getpriority", lambda *_: nice)
    ticks = os.sysconf("SC_CLK_TCK")
    row = f"{9 * ticks} {2 * ticks} {9 * ticks} {3 * ticks} {4 * ticks} 0 0 0 0 0"
    mine = sorted(os.sched_getaffinity(0))
    path = tmp_path / "stat"
    path.write_text(f"cpu  {row}\n" + "".join(f"cpu{n} {row}\n" for n in (*mine, 4095)))
    assert spare_seconds(path) == spare * len(mine)
    assert spare_seconds(tmp_path / "none") == 0.0 < spare_seconds()


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


def test_where_the_program_uses_its_quota_one_serves_and_has_its_share(workers: Any) -> None:
    program = Program()
    workers._pace = pace_of(program, 16, quota=4.0)
    program.runs({str(number): 1.0 for number in range(4)})
    assert workers._most() == 0
    assert workers._begin_serving() is True and workers._begin_serving() is False


def test_compilers_that_give_way_have_what_parallel_regions_leave(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program()
    workers._pace = pace_of(program, 16)
    regions = {f"thread {number}": 0.1 for number in range(16)}
    request: Any = Request({}, print, workers._queue.settings, 0.0, 0.0, 0, 0.0)
    monkeypatch.setattr("eagercache.service.workers.free_bytes", lambda: 64 << 30)

    def runs(spare: float) -> dict[str, Any]:
        program.spare += spare
        program.runs(regions)
        message = workers._message(request)
        return {name: message[name] for name in ("processors", "left_over")}

    assert runs(14.4) == {"processors": 1, "left_over": 14}
    assert runs(1.2) == {"processors": 1, "left_over": 0}  # now and then there is none
    monkeypatch.setattr("eagercache.service.workers.free_bytes", lambda: 3 << 30)
    assert runs(14.4) == {"processors": 1, "left_over": 6}  # they need memory, too
    message = {"processors": 1, "left_over": 14}
    for policy, compilers in ((os.SCHED_OTHER, 1), (os.SCHED_BATCH, 1), (os.SCHED_IDLE, 14)):
        monkeypatch.setattr("os.sched_getscheduler", lambda _, policy=policy: policy)
        assert _processors(message) == compilers
    assert _processors({}) == 0  # nobody says


def test_the_first_module_for_a_gpu_waits_until_something_is_known(workers: Any) -> None:
    program, waited = Program(), []
    pace = workers._pace = pace_of(program, 16)

    def rest(seconds: float) -> None:
        waited.append(seconds)
        program.spare += 15.0 * seconds
        program.runs({"main": 1.0}, seconds)

    wait = pace.wait_until_known
    pace.wait_until_known = lambda: wait(rest)
    for gpu, kind, passed in ((None, "module", 0.0), ("GPU-1", "", 0.0), ("GPU-1", "module", 0.25)):
        program.now += passed
        settings = dataclasses.replace(workers._queue.settings, gpu=gpu)
        request: Any = Request({"kind": kind}, print, settings, 0.0, 0.0, 0, 0.0)
        before = workers._message(request)["processors"]
    assert before == 8 and waited == [pytest.approx(SAMPLE_SECONDS - 0.25)]
    workers._message(request)
    assert len(waited) == 1  # known by now


def test_workers_give_way_on_machines_with_room(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program()
    workers._pace = pace_of(program, 16)
    assert workers._has_room()
    program.runs({})
    assert not workers._has_room()
    program.runs({})
    program.spare += 10.0
    assert workers._has_room()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert not workers._has_room()


def test_who_says_how_many_workers_gets_them(tmp_path: Path) -> None:
    settings = ServiceSettings(str(tmp_path), "", workers=3, slots_folder=tmp_path / "slots")
    assert Workers(RequestQueue(settings))._most() == 3
