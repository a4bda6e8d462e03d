"""What counts as faster. The probe's times follow rules."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from conftest import Program
from eagercache.worker.timing import timing

pytestmark = pytest.mark.once


class Clock:
    """A probe whose times follow a rule; counts what it was asked."""

    captured = forced = True
    aside = error = ""

    def __init__(self, native: float, kernel: Callable[[int], float]) -> None:
        self.native, self.kernel, self.count, self.calls = native, kernel, 0, 0

    def capture(self) -> None: ...
    def force(self) -> None: ...
    def load(self, path: str) -> None: ...

    def digest(self, choose: str) -> str:
        return choose

    def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
        self.calls = calls
        result = [(self.native, self.kernel(self.count + i)) for i in range(pairs)]
        self.count += pairs
        return result


class PlayedWatch:
    """A scheduler that leaves alone the samples for whose number ``rule`` is true."""

    def __init__(self, rule: Callable[[int], bool], alone: bool = False) -> None:
        self.rule, self.is_alone, self.count = rule, alone, 0

    def begin(self) -> None:
        self.count += 1

    def undisturbed(self) -> bool:
        return self.rule(self.count)

    def alone(self) -> bool:
        return self.is_alone

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Callable[[PlayedWatch], None]:
    """Has timings see another scheduler than this machine's: at first one of a quiet machine."""

    def use(watch: PlayedWatch) -> None:
        monkeypatch.setattr(timing, "Watch", lambda: watch)

    use(PlayedWatch(lambda _: True))
    monkeypatch.setattr(timing, "NOISY_TIME_BUDGET", 0.2)
    return use


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (lambda i: 50_000.0, (True, "")),
        (lambda i: 99_000.0, (False, "slower")),
        (lambda i: 130_000.0, (False, "slower")),
        (lambda i: 97_000.0 + 20_000.0 * math.sin(i), (False, "undecided")),
    ],
)
def test_only_a_clear_win_is_a_win(
    kernel: Callable[[int], float], expected: tuple[bool, str]
) -> None:
    found = timing.time_call(Clock(100_000.0, kernel))
    assert timing.decide(found, margin=0.03) == expected


def test_a_kernel_wins_on_all_data_or_not_at_all() -> None:
    natives = iter([7_000_000.0, 70_000.0, 70_000.0])
    clock = Clock(0.0, lambda i: 160_000.0)

    def put() -> None:
        clock.native = next(natives)

    found = timing.time_on_each(clock, [put, put, put], margin=0.03)
    assert found.native_ns < 70_000.0 and timing.decide(found, 0.03) == (False, "slower")
    assert next(natives), "data after that on which it lost is not looked at"


def test_other_data_is_timed_no_longer_than_it_takes() -> None:
    clock = Clock(100_000.0, lambda i: 50_000.0)
    counts: list[int] = []
    found = timing.time_on_each(clock, [lambda: counts.append(clock.count)] * 2, margin=0.03)
    first, both = counts[1], clock.count
    assert 0 < both - first < first
    assert found.pairs == first - 4, "what is kept is the first data's timing"


@pytest.mark.parametrize("kernel", [50_000.0, 200_000.0])
def test_who_wins_is_seen_sooner_than_by_how_much(kernel: float) -> None:
    def wandering(i: int) -> float:
        return kernel * (1.0 + 0.1 * math.sin(i))

    quick, full = Clock(100_000.0, wandering), Clock(100_000.0, wandering)
    found = timing.time_call(quick, edge=0.97)
    assert timing.decide(found, 0.03) == timing.decide(timing.time_call(full), 0.03)
    assert found.pairs == 9 and quick.count < full.count


def test_what_the_caller_pays_for_boxing_is_counted() -> None:
    found = timing.time_call(Clock(400.0, lambda i: 300.0))
    assert found.native_ns == 400.0 - timing.BOXING_ON_NATIVE_NS
    assert found.kernel_ns == 300.0 + timing.BOXING_ON_HIT_NS
    assert not timing.decide(found, 0.03)[0]


def test_slow_calls_are_timed_few_times_and_quick_ones_many() -> None:
    slow, quick = Clock(5e7, lambda i: 4e7), Clock(300.0, lambda i: 200.0)
    timing.time_call(slow)
    timing.time_call(quick)
    assert slow.calls == 1 and quick.calls > 1000


@pytest.mark.parametrize(
    ("seconds", "longest", "decided"), [(0.05, 3, True), (1, 20, True), (4, 90, False)]
)
def test_a_call_of_seconds_is_timed_until_enough_pairs_are_there_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, seconds: float, longest: float, *, decided: bool
) -> None:
    now = 0.0

    class Slow(Clock):
        def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
            nonlocal now
            now += pairs * calls * 1.5 * seconds
            return super().time(pairs, calls)

    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: now))
    found = timing.time_call(Slow(seconds * 1e9, lambda i: seconds * 5e8))
    assert timing.decide(found, margin=0.03)[0] == decided
    assert now <= longest


def test_too_few_pairs_decide_nothing() -> None:
    assert timing._ratio_interval([(100.0, 1.0)] * 4) == (0.0, math.inf)
    low, high = timing._ratio_interval([(10_060.0, 4_940.0)] * 9)
    assert low == high == 0.5


def test_pairs_that_other_processes_disturbed_do_not_count() -> None:
    def kernel(i: int) -> float:
        return 50_000.0 if i % 3 else 9_000_000.0

    found = timing.time_call(Clock(100_000.0, kernel))
    assert timing.decide(found, margin=0.03) == (True, "")
    assert found.kernel_ns < 60_000


def test_a_machine_that_is_never_quiet_still_ends_and_decides_nothing_rashly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "NOISY_TIME_BUDGET", 0.2)
    found = timing.time_call(Clock(100_000.0, lambda i: 50_000.0 * 2 ** (i % 40)))
    assert found.pairs >= 1


TURN = 7_998_000.0  # two turns of a scheduler


def test_samples_that_the_scheduler_touched_do_not_count(
    scheduler: Callable[[PlayedWatch], None],
) -> None:
    watch = PlayedWatch(lambda i: i % 4 == 0)
    scheduler(watch)

    class Preempted(Clock):
        def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
            self.calls = calls
            waits = 0.0 if watch.undisturbed() else TURN
            return [(9_200.0 + waits, 5_500.0 + waits)] * pairs

    found = timing.time_call(Preempted(0.0, lambda i: 0.0))
    assert timing.decide(found, 0.03) == (True, "") and not found.disturbed
    assert found.native_ns < 10_000 and found.pairs >= 9


def test_what_the_scheduler_never_left_alone_is_not_decided(
    scheduler: Callable[[PlayedWatch], None],
) -> None:
    for kernel in (TURN + 1_000, TURN / 2, 3 * TURN):
        scheduler(PlayedWatch(lambda _: False))
        found = timing.time_call(Clock(TURN, lambda i, kernel=kernel: kernel))
        assert timing.decide(found, 0.03) == (False, timing.UNDECIDED)
        assert found.disturbed and found.pairs == 0


def test_waits_are_our_own_where_nobody_else_uses_the_machine(
    scheduler: Callable[[PlayedWatch], None],
) -> None:
    scheduler(PlayedWatch(lambda _: False, alone=True))
    found = timing.time_call(Clock(100_000.0, lambda i: 50_000.0))
    assert timing.decide(found, 0.03) == (True, "") and not found.disturbed


@pytest.mark.parametrize(("native", "kernel"), [(TURN, TURN + 1_000), (23_998_000.0, 7_994_000.0)])
def test_times_that_are_turns_of_a_scheduler_are_none_of_a_call(
    native: float, kernel: float
) -> None:
    found = timing.time_call(Clock(native, lambda i: kernel))
    assert found.disturbed
    assert timing.decide(found, 0.03) == (False, timing.UNDECIDED)


def test_a_long_call_is_no_turn_of_a_scheduler() -> None:
    for native, kernel in ((7_500_000.0, 3_990_000.0), (2_000_000_000.0, 1_000_000_000.0)):
        found = timing.time_call(Clock(native, lambda i, kernel=kernel: kernel))
        assert timing.decide(found, 0.03) == (True, "") and not found.disturbed


def test_beside_others_samples_become_short(scheduler: Callable[[PlayedWatch], None]) -> None:
    quiet, busy = (Clock(10_000.0, lambda i: 5_000.0) for _ in range(2))
    timing.time_call(quiet)
    scheduler(PlayedWatch(lambda _: False))
    timing.time_call(busy)
    assert quiet.calls == 40 and busy.calls == 6


def test_a_first_estimate_that_was_disturbed_is_corrected() -> None:
    class Preempted(Clock):
        def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
            waits = TURN if self.count < 4 else 0.0
            return [(a + waits, b + waits) for a, b in super().time(pairs, calls)]

    clock = Preempted(10_000.0, lambda i: 5_000.0)
    found = timing.time_call(clock)
    assert clock.calls == found.calls == 40
    assert timing.decide(found, 0.03) == (True, "")


def test_a_correction_after_the_time_is_up_is_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count(0.0, 60.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    clock = Clock(100_000.0, lambda i: 50_000.0)
    answers = iter([100.0, 100.0])  # what the first calls take longer

    def time_disturbed(pairs: int, calls: int) -> list[tuple[float, float]]:
        slow = next(answers, 1.0)
        return [(a * slow, b * slow) for a, b in Clock.time(clock, pairs, calls)]

    monkeypatch.setattr(clock, "time", time_disturbed)
    assert timing.time_call(clock).native_ns == 100_000.0 - timing.BOXING_ON_NATIVE_NS


def test_workers_take_turns_at_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_TIMEOUT", 0.3)
    with timing.machine_to_itself():
        begin = time.monotonic()
        with timing.machine_to_itself():
            assert time.monotonic() - begin >= 0.3
    begin = time.monotonic()
    with timing.machine_to_itself():
        assert time.monotonic() - begin < 0.2


PREEMPTED = """
import os, time
from eagercache.worker.timing.scheduler import Watch

def spin(seconds):
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        pass

def shares():
    watch = Watch()
    seen = []
    for _ in range(40):
        watch.begin()
        spin(0.02)
        seen.append(watch.undisturbed())
    alone = watch.alone()
    watch.close()
    return sum(seen), alone

os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
children = [os.fork() for _ in range(3)]
if 0 in children:
    spin(60)
    os._exit(0)
try:
    beside = shares()
finally:
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
report(beside=beside)
"""


def test_processes_on_the_same_core_are_seen(program: Program) -> None:
    undisturbed, alone = program(PREEMPTED)["beside"]
    assert undisturbed <= 4 and not alone


IDLE_THREADS = """
import os, time, torch
from pathlib import Path
from eagercache.worker.timing import idle_threads

def threads(wanted):  # a thread that ended is seen for a moment longer
    for _ in range(2_000):
        count = len(list(Path("/proc/self/task").iterdir()))
        if wanted(count):
            break
        time.sleep(0.01)
    return count

cores = len(os.sched_getaffinity(0))
before = threads(lambda count: True)
with idle_threads.spinning():
    pass
held = [threads(lambda count: True)]
idle_threads.keep_asleep()
idle_threads.keep_asleep()  # once is enough
held.append(threads(lambda count: count > before + cores))
with idle_threads.spinning():
    released = threads(lambda count: count == before)
held.append(threads(lambda count: count > before + cores))
report(before=before, held=held, released=released, cores=cores)
"""


def test_a_team_larger_than_the_machine_is_held_but_while_something_is_timed(
    program: Program,
) -> None:
    seen = program(IDLE_THREADS)
    before, team = seen["before"], seen["before"] + seen["cores"] + 1
    assert seen["held"] == [before, team, team]
    assert seen["released"] == before
