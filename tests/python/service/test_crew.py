"""Workers that have become too many are stopped, and lose nothing by it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from eagercache.base.frames import write_frame
from eagercache.service.crew import FULL_LOOKS, SHARE_SECONDS, Crew
from eagercache.service.process_group import ProcessGroup
from eagercache.service.worker_pipe import PipeTimeout, WorkerPipe
from eagercache.service.workers import Workers
from misbehaving_worker import Answers, Bench, bench, call, wait_until

__all__ = ["bench"]  # a fixture

pytestmark = pytest.mark.once  # processes and clocks


class Worker:
    """One that is played; ``turns`` counts how often it went on."""

    def __init__(self, *, gives_way: bool = False) -> None:
        self.runs = True
        self.turns = 0
        self.gives_way = gives_way
        self.replaced = False

    def pause(self) -> None:
        """Stops."""
        self.runs = False

    def go_on(self) -> None:
        """Runs."""
        self.turns += not self.runs
        self.runs = True

    def replace(self) -> None:
        """Ends."""
        self.replaced = True


class Machine:
    """What the program leaves."""

    def __init__(self, allowed: int, *, room: bool = True) -> None:
        self.allowed = allowed
        self.room = room

    def crew(self, *, watched: bool = True) -> Crew:
        """Without a thread, where it is ``watched`` already: the test looks."""
        made = Crew(lambda: self.allowed, lambda: self.room)
        made._watched = watched
        return made


def test_those_that_began_last_are_stopped_and_have_turns() -> None:
    machine = Machine(3)
    crew = machine.crew()
    workers = [Worker() for _ in range(3)]
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(crew.at_work(worker))
        assert crew.look() and [worker.runs for worker in workers] == [True, True, True]
        machine.allowed = 1
        ran: list[list[bool]] = []
        for _ in range(4):
            assert crew.look(lambda _: ran.append([worker.runs for worker in workers]))
            assert [worker.runs for worker in workers] == [True, False, False]
        assert sorted(map(tuple, ran)) == 2 * [(True, False, True)] + 2 * [(True, True, False)]
        machine.allowed = 2
        assert crew.look() and [worker.runs for worker in workers] == [True, True, False]
    assert all(worker.runs for worker in workers)


def test_where_none_may_run_one_has_its_share() -> None:
    crew, worker = Machine(0).crew(), Worker()
    seen: list[tuple[float, bool]] = []
    with crew.at_work(worker):
        assert crew.look(lambda seconds: seen.append((seconds, worker.runs)))
        assert not worker.runs
    assert seen == [(SHARE_SECONDS, True)] and worker.runs


def test_what_is_done_is_never_left_stopped() -> None:
    crew, first, second = Machine(1).crew(), Worker(), Worker()
    with crew.at_work(first):
        with crew.at_work(second):
            crew.look()
            assert not second.runs
        assert second.runs
    with crew.at_work(second), crew.at_work(first):
        crew._busy.remove(second)  # what began first has ended
        assert crew.look() and first.runs
        crew._busy.append(second)
    assert not crew.look()


def test_a_thread_looks_while_one_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagercache.service.crew.SAMPLE_SECONDS", 0.01)
    crew, first, second = Machine(1).crew(watched=False), Worker(), Worker()
    with crew.at_work(first), crew.at_work(second):
        deadline = time.monotonic() + 30
        while second.turns < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert second.turns >= 3 and first.turns == 0
    deadline = time.monotonic() + 30
    while crew._watched and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not crew._watched


def test_one_that_gives_way_is_replaced_on_a_machine_that_stays_full() -> None:
    machine = Machine(2, room=False)
    crew, polite, other = machine.crew(), Worker(gives_way=True), Worker()
    with crew.at_work(polite), crew.at_work(other):
        for _ in range(FULL_LOOKS - 1):
            crew.look()
        machine.room = True
        crew.look()
        machine.room = False
        for _ in range(FULL_LOOKS - 1):
            crew.look()
        assert not polite.replaced
        crew.look()
        assert polite.replaced and not other.replaced


@pytest.mark.parametrize("batch", [1, 8])
def test_what_a_replaced_worker_was_at_is_answered_by_the_next_one(
    bench: Bench, batch: int
) -> None:
    service, answers = bench.service(largest_batch=batch, first_batch=batch), Answers()
    for number, do in enumerate(("hang_once", "answer", "answer")):
        service.submit(call(number, do), answers)
    assert wait_until(lambda: bench.pids("child"))
    with service._queue.changed:
        requests = list(service._queue.unanswered.values())
        (worker,) = service._workers.processes
    worker.replace()
    assert service.wait(60)
    assert {one["verdict"] for one in answers.all} == {"kernel"} and len(answers.all) == 3
    assert [one.crashes for one in requests] == [0] * len(requests)
    assert not any(one.alone for one in requests)
    # The next one has a share of the processor, whoever else wants it.
    assert any(one.replaced for one in requests)
    assert len(bench.pids("start")) == 2


@pytest.mark.parametrize("room", [True, False])
def test_where_there_is_room_workers_and_their_compilers_give_way_to_everybody(
    bench: Bench, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workers, "_has_room", lambda _: room)
    service = bench.service()
    service.submit(call(1, "hang"), Answers())
    assert wait_until(lambda: bench.pids("child"))
    with service._queue.changed:
        (worker,) = service._workers.processes
    assert worker.gives_way is room
    for pid in (worker.pid, *bench.pids("child")):
        assert (os.sched_getscheduler(pid) == os.SCHED_IDLE) is room
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


# ---- process groups ------------------------------------------------------------------------------

TICKING = """
import subprocess, sys, time
child = "import sys, time\\nwhile True:\\n    open(sys.argv[1], 'a').write('x'); time.sleep(0.01)"
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
time.sleep(600)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[tuple[ProcessGroup, subprocess.Popen[bytes], Path]]:
    """A process whose child makes a file longer and longer."""
    path = tmp_path / "ticks"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", TICKING, str(path)], start_new_session=True
    )
    made = ProcessGroup(process.pid)
    try:
        _wait_for_ticks(path, 1)
        yield made, process, path
    finally:
        made.end()
        process.wait()


def _wait_for_ticks(path: Path, more: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_size >= size + more:
            return
        time.sleep(0.01)
    raise AssertionError("it does not run")


def _stands_still(path: Path) -> bool:
    time.sleep(0.05)  # what was under way when the signal came
    size = path.stat().st_size
    time.sleep(0.3)
    return path.stat().st_size == size


def test_a_pause_holds_for_all_of_the_group(
    group: tuple[ProcessGroup, subprocess.Popen[bytes], Path],
) -> None:
    process, leader, path = group
    process.pause()
    process.pause()
    assert _stands_still(path)
    process.go_on()
    _wait_for_ticks(path, 3)
    process.pause()
    process.end()
    assert leader.wait(30) == -signal.SIGKILL  # a stopped one ends, too


def test_deadlines_are_put_off_by_pauses() -> None:
    paused = ProcessGroup(1 << 22)  # no such group: only the clock is asked
    answers, other_end = os.pipe()
    try:
        pipe = WorkerPipe(other_end, answers, paused.clock)
        paused.pause()
        standing = paused.clock()
        time.sleep(0.2)
        assert paused.clock() == standing
        with ThreadPoolExecutor(1) as thread:
            frame = thread.submit(pipe.read, 0.05)
            time.sleep(0.4)
            os.write(other_end, frame_of_bytes({"id": 1}))
            assert frame.result(30) == {"id": 1}
        paused.go_on()
        with pytest.raises(PipeTimeout):
            pipe.read(0.02)
    finally:
        os.close(answers)
        os.close(other_end)


def frame_of_bytes(content: dict[str, int]) -> bytes:
    """A frame as a worker writes it."""
    sink = io.BytesIO()
    write_frame(sink, content)
    return sink.getvalue()


def test_nobody_stays_stopped_where_the_thread_that_looks_fails() -> None:
    crew, first, second = Machine(1).crew(), Worker(), Worker()
    with crew.at_work(first), crew.at_work(second):
        crew.look(lambda _: None)
        assert not second.runs

        def fails() -> int:
            raise OSError("no /proc")

        crew._most = fails
        crew._watch()
        assert second.runs and not crew._watched
