"""The service's workers and the machine's: when they start, end, wait and are given up."""

from __future__ import annotations

import itertools

import pytest
from misbehaving_worker import Answers, Bench, bench, call, gone, wait_until

__all__ = ["bench"]

pytestmark = pytest.mark.once


class Machine:
    """Whether it is idle is for the test to say."""

    def __init__(self) -> None:
        self.idle = False
        self.looks = 0

    def __call__(self) -> bool:
        self.looks += 1
        return self.idle

    def looked_at(self, times: int) -> None:
        before = self.looks
        assert wait_until(lambda: self.looks >= before + times)


def test_what_is_measured_again_waits_for_an_idle_machine_and_nobody_for_it(bench: Bench) -> None:
    machine, answers = Machine(), Answers()
    service = bench.service(again_delay=0.0, idle_check=0.01, machine_is_idle=machine)
    service.submit(call(1, "answer", again=1), answers)
    assert service.wait(0) and service.unanswered() == []
    machine.looked_at(3)
    assert answers.all == []
    machine.idle = True
    assert wait_until(lambda: len(answers.all) == 1)
    assert answers.by_id()[1]["verdict"] == "kernel"


def test_what_is_measured_again_comes_after_everything_else(bench: Bench) -> None:
    machine, answers = Machine(), Answers()
    service = bench.service(again_delay=0.0, idle_check=0.01, machine_is_idle=machine)
    service.submit(call(1, "answer", again=1), answers)
    service.submit(call(2, "busy_twice"), answers)
    machine.idle = True
    service.submit(call(3, "slow"), answers)
    assert wait_until(lambda: len(answers.all) == 3)
    assert [answer["id"] for answer in answers.all][-1] == 1


def test_what_waits_for_an_idle_machine_is_answered_at_the_end(bench: Bench) -> None:
    answers = Answers()
    service = bench.service(again_delay=600.0)
    service.submit(call(1, "answer", again=1), answers)
    service.close()
    assert wait_until(lambda: len(answers.all) == 1)
    assert answers.all[0]["verdict"] == "failed"


def test_busy_calls_come_again_until_they_are_answered(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "busy_twice"), answers)
    assert service.wait(30)
    assert [answer["verdict"] for answer in answers.all] == ["kernel"]
    assert sum(note.startswith("busy_twice") for note in bench.notes) == 3


def test_a_call_that_stays_busy_is_given_up(bench: Bench) -> None:
    service, answers = bench.service(busy_limit=0.2), Answers()
    service.submit(call(1, "busy"), answers)
    assert service.wait(30)
    assert answers.all[0]["failure"] == "transient"


def test_requests_are_served_while_another_one_is_busy(bench: Bench) -> None:
    service, answers = bench.service(busy_first_delay=1.0), Answers()
    service.submit(call(1, "busy_twice"), answers)
    service.submit(call(2), answers)
    assert wait_until(lambda: 2 in answers.by_id())
    assert 1 not in answers.by_id()


def test_a_worker_that_cannot_start_fails_its_request(bench: Bench) -> None:
    service, answers = bench.service(extra={"BROKEN": "1"}), Answers()
    service.submit(call(1), answers)
    assert service.wait(60)
    assert "exited with 3" in answers.all[0]["reason"]
    missing = bench.service(python="/no/such/python")
    missing.submit(call(2), answers)
    assert missing.wait(10)
    assert answers.by_id()[2]["reason"] == "the compile worker cannot be started"


def test_workers_are_replaced_after_their_share(bench: Bench) -> None:
    service, answers = bench.service(requests_per_worker=2), Answers()
    for number in range(5):
        service.submit(call(number), answers)
    assert service.wait(60)
    assert len(bench.pids("start")) == 3


def test_two_workers_work_at_the_same_time(bench: Bench) -> None:
    service, answers = bench.service(workers=2), Answers()
    for number in range(6):
        service.submit(call(number, "slow"), answers)
    assert service.wait(60)
    assert len(bench.pids("start")) == 2


def test_two_services_share_the_slots_of_the_machine(bench: Bench) -> None:
    services = [bench.service() for _ in range(2)]
    for service in services:
        service._workers._slots.count = 1
    answers = Answers()
    for number in range(6):
        services[number % 2].submit(call(number, "slow"), answers)
    assert all(service.wait(60) for service in services)
    assert len(answers.all) == 6
    spans = [note.split() for note in bench.notes if note.startswith("span ")]
    ordered = sorted((float(begin), float(end)) for _, begin, end in spans)
    assert len(ordered) == 6
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))


def test_an_idle_worker_is_ended_and_another_one_started_when_needed(bench: Bench) -> None:
    service, answers = bench.service(idle_timeout=0.2), Answers()
    service.submit(call(1), answers)
    assert service.wait(60)
    (worker,) = bench.pids("start")
    assert wait_until(lambda: gone(worker), 60)
    service.submit(call(2), answers)
    assert service.wait(60)
    assert len(bench.pids("start")) == 2
    assert [answer["verdict"] for answer in answers.all] == ["kernel"] * 2


def test_new_settings_hold_for_later_requests(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1), answers)
    assert service.wait(30)
    service.reconfigure(choose="always")
    service.submit(call(2), answers)
    assert service.wait(30)
    assert bench.notes[-2:] == ["answer 1 faster", "answer 2 always"]
