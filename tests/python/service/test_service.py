"""The service answers every request once, whatever its workers do, and leaves nothing behind.

Most of it is about processes, so the worker is that of `misbehaving_worker.py`. `test_worker.py`
has the real one.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from misbehaving_worker import Answers, Bench, bench, call, gone, wait_until

__all__ = ["bench"]

pytestmark = pytest.mark.once


def test_what_is_cut_off_has_not_failed(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "answer"), answers)
    assert service.wait(30)
    assert service.unfinished() == []
    for number in (2, 3):
        service.submit(call(number, "hang"), answers)
    assert {row["id"] for row in service.unfinished()} == {2, 3}
    assert wait_until(lambda: bench.pids("child"))
    service.close()
    assert wait_until(lambda: len(answers.all) == 3)
    assert {row["id"] for row in service.unfinished()} == {2, 3}
    assert service.failures == 0


def test_nothing_starts_before_the_first_request(bench: Bench) -> None:
    threads = threading.active_count()
    service = bench.service()
    assert threading.active_count() == threads
    assert service.wait(0.0)
    service.close()
    assert bench.notes == []


def test_one_worker_answers_all_requests_once_each(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    for number in range(10):
        service.submit(call(number), answers)
    assert service.wait(30)
    assert sorted(answer["id"] for answer in answers.all) == list(range(10))
    assert len(bench.pids("start")) == 1
    assert (service.compiles, service.failures) == (10, 0)
    assert service.seconds == pytest.approx(15.0)  # parts of a step are not counted twice


def test_waiting_requests_are_asked_for_together(bench: Bench) -> None:
    service, answers = bench.service(first_batch=2, largest_batch=4), Answers()
    service.submit(call(0, "slow"), answers)
    assert wait_until(lambda: "slow 0 faster" in bench.notes, 60)
    for number in range(1, 8):
        service.submit(call(number), answers)
    assert service.wait(60)
    assert sorted(answer["id"] for answer in answers.all) == list(range(8))
    assert [note for note in bench.notes if note.startswith("batch")] == ["batch 4", "batch 3"]
    assert service.compiles == 8


def test_answers_that_come_together_are_all_delivered(bench: Bench) -> None:
    service, answers = bench.service(largest_batch=8, request_timeout=120.0), Answers()
    service.submit(call(0, "slow"), answers)
    assert wait_until(lambda: "slow 0 faster" in bench.notes, 60)
    for number, do in enumerate(["hold", "hold", "answer"], start=1):
        service.submit(call(number, do), answers)
    assert service.wait(60)
    assert sorted(answer["id"] for answer in answers.all) == [0, 1, 2, 3]


def test_a_batch_whose_worker_dies_is_tried_one_by_one(bench: Bench) -> None:
    service, answers = bench.service(largest_batch=8), Answers()
    service.submit(call(0, "slow"), answers)
    assert wait_until(lambda: "slow 0 faster" in bench.notes, 60)
    for number, do in enumerate(["answer", "crash", "answer", "busy_twice"], start=1):
        service.submit(call(number, do), answers)
    assert service.wait(60)
    verdicts = {number: answer["verdict"] for number, answer in answers.by_id().items()}
    assert verdicts == {0: "kernel", 1: "kernel", 2: "failed", 3: "kernel", 4: "kernel"}
    assert len(answers.all) == 5
    assert sum(note.startswith("batch") for note in bench.notes) == 1
    assert sum(note.startswith("crash 2") for note in bench.notes) == 3  # with others, alone, again


def test_of_a_batch_only_the_one_goes_on_alone_that_the_worker_died_of(bench: Bench) -> None:
    service, answers = bench.service({"SAYS_WHERE": "1"}, largest_batch=8), Answers()
    service.submit(call(0, "slow"), answers)
    assert wait_until(lambda: "slow 0 faster" in bench.notes, 60)
    for number, do in enumerate(["answer", "crash", "answer", "answer", "answer"], start=1):
        service.submit(call(number, do), answers)
    assert service.wait(60)
    verdicts = {number: answer["verdict"] for number, answer in answers.by_id().items()}
    assert verdicts == {0: "kernel", 1: "kernel", 2: "failed", **dict.fromkeys((3, 4, 5), "kernel")}
    assert len(answers.all) == 6
    assert "SIGSEGV" in answers.by_id()[2]["reason"]
    assert [note for note in bench.notes if note.startswith("crash 2")] == ["crash 2 faster"] * 2
    assert len(bench.pids("start")) == 3  # the batch's, the lonely one's, and one for the rest
    # Together, or, where the lonely one's turn was first, in the batch that had room.
    assert "batch 3" in bench.notes


def test_one_that_loses_batch_after_batch_goes_on_alone(bench: Bench) -> None:
    service, answers = bench.service({"SAYS_WHERE": "1"}, largest_batch=8), Answers()
    service.submit(call(0, "slow"), answers)
    assert wait_until(lambda: "slow 0 faster" in bench.notes, 60)
    for number, do in enumerate(["crash", "crash", "answer"], start=1):
        service.submit(call(number, do), answers)
    assert service.wait(60)
    verdicts = {number: answer["verdict"] for number, answer in answers.by_id().items()}
    assert verdicts == {0: "kernel", 1: "failed", 2: "failed", 3: "kernel"}
    assert len(answers.all) == 4


def test_what_saves_most_is_compiled_first(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(0, "slow"), answers)
    assert wait_until(lambda: "slow 0 faster" in bench.notes, 60)
    small = {"kind": "tensor", "sizes": [8]}
    large = {"kind": "tensor", "sizes": [512, 512]}
    service.submit({**call(1), "calls": 2, "args": [small]}, answers)
    service.submit({**call(2), "calls": 5, "args": [small]}, answers)
    service.submit({**call(3), "calls": 2, "args": [small, {"kind": "none"}, large]}, answers)
    service.submit({**call(4), "calls": 2, "native_ns": 1e9}, answers)
    assert service.wait(60)
    assert [answer["id"] for answer in answers.all] == [0, 4, 3, 2, 1]


def test_output_of_libraries_does_not_reach_the_protocol(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    for number in range(3):
        service.submit(call(number, "print"), answers)
    assert service.wait(30)
    assert [answer["verdict"] for answer in answers.all] == ["kernel"] * 3


def test_what_is_open_when_the_service_is_closed_is_known(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    for number in range(3):
        service.submit(call(number, "hang"), answers)
    service.close()
    assert [(one.description["id"], one.crashes) for one in service.left_open] == [
        (call(number, "hang")["id"], 0) for number in range(3)
    ]


def test_wait_gives_up_after_its_timeout(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "hang"), answers)
    begin = time.monotonic()
    assert not service.wait(0.2)
    assert time.monotonic() - begin < 2.0


def test_close_ends_everything_within_two_seconds_and_answers_the_rest(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    for number in range(4):
        service.submit(call(number, "hang"), answers)
    assert wait_until(lambda: bench.pids("child"))
    begin = time.monotonic()
    service.close()
    assert time.monotonic() - begin < 2.0
    assert wait_until(lambda: len(answers.all) == 4)
    assert {answer["verdict"] for answer in answers.all} == {"failed"}
    assert wait_until(lambda: all(gone(p) for p in bench.pids("child") + bench.pids("start")))
    service.submit(call(9), answers)
    assert answers.by_id()[9]["reason"] == "the compile service is closed"
    service.close()


def test_a_callback_that_raises_does_not_stop_the_service(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    service, answers = bench.service(), Answers()

    def broken(_: dict[str, Any]) -> None:
        raise RuntimeError("a broken callback")

    with caplog.at_level(logging.ERROR, logger="eagercache"):
        service.submit(call(1), broken)
        service.submit(call(2), answers)
        assert service.wait(30)
    assert [answer["id"] for answer in answers.all] == [2]
    assert "delivering the verdict on aten::abs failed" in caplog.text
