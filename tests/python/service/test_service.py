"""The service answers every request once, whatever its workers do, and leaves nothing behind.

Most of it is about processes, so the worker here is a small program that speaks the protocol and
misbehaves as the request says. `test_worker.py` has the real one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagercache
import pytest
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings

pytestmark = pytest.mark.once

SOURCES = str(Path(eagercache.__file__).parents[1])
# Speaks the protocol; `do` in the description says how to behave. Keeps a note of what it was
# asked.
WORKER = """
import io, json, os, signal, subprocess, sys, time, types
# Packages that are their folders alone: ours would import torch, which takes seconds.
for package in ("eagercache", "eagercache.base", "eagercache.worker"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [os.path.join(os.environ["SOURCES"], *package.split("."))]
from eagercache.worker.main import read_frame, watch_parent, write_frame
assert "torch" not in sys.modules
source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
watch_parent(int(sys.argv[-1]))
notes = open(os.environ["NOTES"], "a")
def note(text):
    notes.write(text + "\\n"); notes.flush()
note(f"start {os.getpid()}")
held = io.BytesIO()  # answers that go out together with the next one
if os.environ.get("BROKEN"):
    sys.exit(3)
write_frame(sink, {"ready": True})
def requests():
    while (frame := read_frame(source)) is not None:
        if "batch" in frame:
            note(f"batch {len(frame['batch'])}")
        for index, request in enumerate(frame.get("batch", [frame])):
            if os.environ.get("SAYS_WHERE"):
                write_frame(sink, {"at": index})
            yield index, request
for index, request in requests():
    call = request["description"]
    do = call["do"]
    if "record" in request:
        note("record " + request["record"]["failure"] + " " + request["record"]["reason"])
        do = "answer"
    else:
        note(f"{do} {call['id']} {request['choose']}")
    if do == "print":
        print("noise on standard output", flush=True)
        os.write(1, b"and below it")
    if do == "crash" or (do == "crash_once" and not os.path.exists(os.environ["NOTES"] + ".once")):
        open(os.environ["NOTES"] + ".once", "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    if do.startswith("signal "):
        number = int(do.split()[1])
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # nohup has programs ignore SIGHUP
        os.kill(os.getpid(), number)
    if do.startswith("says "):
        print(do[5:], file=sys.stderr, flush=True)
        os._exit(1)
    if do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if do == "half":
        sink.write(b"\\x40\\0\\0\\0half of it"); sink.flush()
        time.sleep(600)
    if do == "odd":
        write_frame(sink, {"id": 1, "index": 0, "verdict": "kernel", "seconds": {"compile": []}})
        continue
    if do == "exit":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(9)
    if do == "hang_once" and open(os.environ["NOTES"]).read().count("hang_once") > 1:
        do = "answer"
    if do.startswith("hang"):
        child = subprocess.Popen(["sleep", "600"])
        note(f"child {child.pid}")
        time.sleep(600)
    if do == "slow":
        begin = time.monotonic()
        time.sleep(0.4)
        note(f"span {begin} {time.monotonic()}")
    verdict = "failed" if do == "fail" else "kernel"
    if do == "busy_twice":
        call["times"] = 1 + open(os.environ["NOTES"]).read().count("busy_twice")
        verdict = "busy" if call["times"] < 4 else "kernel"
    if do == "busy":
        verdict = "busy"
    write_frame(held, {"id": call["id"], "index": index, "verdict": verdict, "reason": "",
                       "found": False, "seconds": {"compile": 1.5, "compile.link": 1.0}})
    if do != "hold":
        sink.write(held.getvalue())
        sink.flush()
        held = io.BytesIO()
"""


class Answers:
    """Collects responses in the order of arrival."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def __call__(self, response: dict[str, Any]) -> None:
        with self.lock:
            self.all.append(response)

    def by_id(self) -> dict[int, dict[str, Any]]:
        return {answer["id"]: answer for answer in self.all}


def worker_files(notes: Path) -> dict[str, str]:
    return {"NOTES": str(notes), "SOURCES": SOURCES}


class Bench:
    """Services with the misbehaving worker, and what the worker noted."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.notes_path = folder / "notes"
        self.services: list[CompileService] = []

    def service(self, extra: dict[str, str] | None = None, **changes: Any) -> CompileService:
        settings: dict[str, Any] = {
            "store_root": "/nowhere",
            "environment": "a: 1\n",
            "workers": 1,
            "request_timeout": 20.0,
            "busy_first_delay": 0.02,
            "slots_folder": self.script.parent / "slots",
            "largest_batch": 1,
            "first_batch": 1,
            "worker_arguments": (str(self.script),),
            "extra_environment": {**worker_files(self.notes_path), **(extra or {})},
            **changes,
        }
        service = CompileService(ServiceSettings(**settings))
        self.services.append(service)
        return service

    @property
    def notes(self) -> list[str]:
        return self.notes_path.read_text().splitlines() if self.notes_path.exists() else []

    def pids(self, word: str) -> list[int]:
        return [int(note.split()[1]) for note in self.notes if note.startswith(word)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for service in bench.services:
        service.close()


def call(number: int, do: str = "answer", **more: Any) -> dict[str, Any]:
    digest = f"{number:064x}"
    return {"id": number, "op": "aten::abs", "overload": "", "digest": digest, "do": do, **more}


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until(condition: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


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


def test_new_settings_hold_for_later_requests(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1), answers)
    assert service.wait(30)
    service.reconfigure(choose="always")
    service.submit(call(2), answers)
    assert service.wait(30)
    assert bench.notes[-2:] == ["answer 1 faster", "answer 2 always"]
