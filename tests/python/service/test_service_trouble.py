"""Whatever goes wrong in the service or with the machine, every request is answered, and for now.

The worker is the one of `misbehaving_worker.py`, which misbehaves as the request says.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from eagercache.service import worker_pipe
from eagercache.service.worker_process import WorkerProcess
from eagercache.service.workers import Workers
from misbehaving_worker import Answers, Bench, bench, call, gone, wait_until

__all__ = ["bench"]

pytestmark = pytest.mark.once

GOES_ON = 30.0  # seconds, within which a service that goes on has answered


def failure(answers: Answers, number: int) -> tuple[str, str]:
    answer = answers.by_id()[number]
    return answer["verdict"], answer.get("failure", "")


def test_an_exception_in_the_service_answers_its_batch_and_the_next_one_is_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1), answers)
    assert service.wait(GOES_ON)
    real = Workers._handle
    raised: list[BaseException] = [ValueError("35 is not a valid Signals"), SystemExit(3)]

    def handle(self: Workers, *arguments: Any) -> Any:
        if raised:
            raise raised.pop(0)
        return real(self, *arguments)

    monkeypatch.setattr(Workers, "_handle", handle)
    for number in (2, 3, 4):
        service.submit(call(number), answers)
        assert service.wait(GOES_ON)
    assert failure(answers, 2) == failure(answers, 3) == ("failed", "transient")
    assert "35 is not a valid Signals" in answers.by_id()[2]["reason"]
    assert answers.by_id()[4]["verdict"] == "kernel"
    assert len(answers.all) == 4
    assert "1 calls stay native for now" in caplog.text
    workers = bench.pids("start")
    assert wait_until(lambda: all(gone(pid) for pid in workers[:-1]))


def test_an_answer_that_makes_no_sense_is_a_failure_for_now(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "odd"), answers)
    service.submit(call(2), answers)
    assert service.wait(GOES_ON)
    assert failure(answers, 1) == ("failed", "transient")
    assert answers.by_id()[2]["verdict"] == "kernel"


def test_a_callback_that_exits_does_not_end_the_service(bench: Bench) -> None:
    service, answers = bench.service(), Answers()

    def leave(_: dict[str, Any]) -> None:
        raise SystemExit(1)

    service.submit(call(1), leave)
    service.submit(call(2), answers)
    assert service.wait(GOES_ON)
    assert answers.by_id()[2]["verdict"] == "kernel"


@pytest.mark.parametrize("number", [35, signal.SIGKILL, signal.SIGHUP, signal.SIGBUS])
def test_a_worker_that_somebody_ends_again_and_again_is_a_failure_for_now(
    bench: Bench, number: int
) -> None:
    service, answers = bench.service(), Answers()
    do = f"signal {int(number)}"
    service.submit(call(1, do), answers)
    service.submit(call(2), answers)
    assert service.wait(60)
    assert failure(answers, 1) == ("failed", "transient")
    assert f"killed by signal {int(number)}" in answers.by_id()[1]["reason"]
    assert answers.by_id()[2]["verdict"] == "kernel"
    assert [note for note in bench.notes if note.startswith("record")] == [
        "record transient " + answers.by_id()[1]["reason"]
    ]


@pytest.mark.parametrize(
    "words",
    [
        "OSError: [Errno 28] No space left on device",
        "MemoryError",
        "ImportError: libgomp.so.1: cannot open shared object file",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_what_a_worker_says_of_the_machine_is_a_failure_for_now(bench: Bench, words: str) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, f"says {words}"), answers)
    assert service.wait(60)
    assert failure(answers, 1) == ("failed", "transient")


def test_a_worker_that_never_starts_is_a_failure_for_now(bench: Bench) -> None:
    service, answers = bench.service(extra={"BROKEN": "1"}), Answers()
    service.submit(call(1), answers)
    assert service.wait(60)
    assert failure(answers, 1) == ("failed", "transient")


def test_where_no_thread_can_be_started_requests_are_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    service, answers = bench.service(), Answers()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        service.submit(call(1), answers)
        service.submit(call(2), answers)
        assert service.wait(0.0)
    assert failure(answers, 1) == failure(answers, 2) == ("failed", "transient")
    assert caplog.text.count("can't start new thread") == 1
    service.submit(call(3), answers)
    assert service.wait(GOES_ON)
    assert answers.by_id()[3]["verdict"] == "kernel"


def test_a_worker_whose_thread_cannot_be_started_is_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "eagercache-worker-log":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    started: list[int] = []
    kill = WorkerProcess.kill
    monkeypatch.setattr(
        WorkerProcess, "kill", lambda self, *rest: (started.append(self.pid), kill(self, *rest))
    )
    service, answers = bench.service(), Answers()
    service.submit(call(1), answers)
    assert service.wait(GOES_ON)
    assert failure(answers, 1) == ("failed", "transient")
    assert started and wait_until(lambda: all(gone(pid) for pid in started))


def test_a_worker_that_is_stopped_does_not_hold_a_long_request(bench: Bench) -> None:
    service, answers = bench.service(start_timeout=20.0), Answers()
    service.submit(call(1), answers)
    assert service.wait(GOES_ON)
    (worker,) = bench.pids("start")
    os.kill(worker, signal.SIGSTOP)
    service.reconfigure(start_timeout=1.0)
    begin = time.monotonic()
    service.submit(call(2, text="x" * 300_000), answers)
    service.submit(call(3), answers)
    assert service.wait(GOES_ON)
    assert time.monotonic() - begin < GOES_ON
    assert failure(answers, 2) == ("failed", "transient")
    assert "did not read its request within 1 s" in answers.by_id()[2]["reason"]
    assert gone(worker)


def test_a_worker_that_writes_half_an_answer_is_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pipe, "FRAME_SECONDS", 0.5)
    service, answers = bench.service(), Answers()
    service.submit(call(1, "half"), answers)
    service.submit(call(2), answers)
    assert service.wait(GOES_ON)
    assert failure(answers, 1) == ("failed", "transient")
    assert answers.by_id()[2]["verdict"] == "kernel"


def test_a_request_that_is_too_large_is_not_sent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pipe, "MAX_FRAME_BYTES", 100_000)
    service, answers = bench.service(), Answers()
    service.submit(call(1, text="x" * 200_000), answers)
    service.submit(call(2), answers)
    assert service.wait(GOES_ON)
    assert failure(answers, 1)[0] == "failed"
    assert "more than a worker takes" in answers.by_id()[1]["reason"]
    assert answers.by_id()[2]["verdict"] == "kernel"


def test_a_crash_is_tried_once_more_and_then_stored_as_deterministic(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "crash"), answers)
    service.submit(call(2), answers)
    assert service.wait(60)
    first = answers.by_id()[1]
    assert (first["verdict"], first["failure"]) == ("failed", "deterministic")
    assert "SIGSEGV" in first["reason"]
    assert answers.by_id()[2]["verdict"] == "kernel"
    assert sum(note.startswith("crash 1") for note in bench.notes) == 2
    recorded = [note for note in bench.notes if note.startswith("record")]
    assert len(recorded) == 1 and recorded[0].startswith("record deterministic")
    assert service.failures == 1


def test_a_worker_that_dies_once_costs_nothing_but_time(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "crash_once"), answers)
    assert service.wait(60)
    assert [answer["verdict"] for answer in answers.all] == ["kernel"]


def test_a_crash_in_an_earlier_process_counts(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "crash_once"), answers, crashes=1)
    assert service.wait(60)
    assert [answer["failure"] for answer in answers.all] == ["deterministic"]


def test_the_last_words_of_a_worker_are_in_the_reason(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "exit"), answers)
    assert service.wait(60)
    assert answers.all[0]["reason"] == "the compile worker exited with 9: the last words"


def test_a_hang_is_ended_with_its_children_and_is_transient(bench: Bench) -> None:
    service, answers = bench.service(request_timeout=1.0), Answers()
    service.submit(call(1, "hang"), answers)
    service.submit(call(2), answers)
    assert service.wait(60)
    assert answers.by_id()[1]["failure"] == "transient"
    assert "did not answer within 1 s" in answers.by_id()[1]["reason"]
    assert answers.by_id()[2]["verdict"] == "kernel"
    assert len(bench.pids("child")) == 1
    assert wait_until(lambda: all(gone(pid) for pid in bench.pids("child")))
