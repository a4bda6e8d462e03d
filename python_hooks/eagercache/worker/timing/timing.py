"""Whether a kernel is faster than native: timing through `_C.Probe`, and the decision."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from eagercache.worker.timing import idle_threads
from eagercache.worker.timing.scheduler import Watch
from eagercache.worker.timing.turns import turn

# The probe times boxed C++ calls on both sides. A C++ caller reaches native unboxed and the hook
# through a boxing step; the difference is the median over the operators of measured.md section 4
# (rows "stock", "boxed hook straight to native" and "unboxed hook straight to native").
BOXING_ON_HIT_NS = 60.0
BOXING_ON_NATIVE_NS = 60.0

TIME_BUDGET = 0.5  # seconds of timing a call
NOISY_TIME_BUDGET = 8.0  # the same, while other processes disturb it
LONG_TIME_BUDGET = 60.0  # the same at most, of a call that takes so long that it needs more
TURN_TIMEOUT = 30.0  # seconds to wait for another worker's timing to end
QUIET = 1.5
_PAIRS_PER_ROUND = 9
_MINIMUM_PAIRS = 9
_MAXIMUM_PAIRS = 99
_NS_PER_SAMPLE = 400_000.0  # of one side of one pair; far above the clock's resolution
_NS_PER_SHORT_SAMPLE = 60_000.0  # the same, where others often take the processors
_MAXIMUM_CALLS = 2_000
_MOST_ROUGH = 20
_FAR_OFF = 4.0  # a first estimate that is so many times too long
_NS_PER_TURN = 4_000_000
_MOST_TURNS = 16
_TURN_NOISE_NS = 30_000
UNDECIDED = "undecided"  # the reason for native where noise hides which side is faster
_CONFIDENCE_Z = 2.576  # 99 %, two-sided


class Probe(Protocol):
    """What is used of `_C.Probe`."""

    captured: bool
    forced: bool
    aside: str
    error: str
    warning: str

    def capture(self) -> None:
        """Arms: the next call on this thread is answered natively and kept."""

    def force(self) -> None:
        """Arms: the next call with the captured key is answered by the loaded kernel."""

    def load(self, path: str, launch_plan: str = "") -> None:
        """Loads a bare kernel, or a container without a plan. Raises RuntimeError."""

    def digest(self, choose: str) -> str:
        """The store's name of the captured call."""
        ...

    def load_cubins(self, objects: Sequence[bytes], launch_plan: str) -> None:
        """Loads a CUDA kernel for the captured call. Raises RuntimeError."""

    def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
        """Nanoseconds a call (native, hit) of the captured call, in alternation."""
        ...


@dataclass(frozen=True)
class Timing:
    """Medians in nanoseconds as an unboxed C++ caller sees them, and the ratio's interval."""

    native_ns: float
    kernel_ns: float
    ratio_low: float  # of kernel / native, 99 % confidence
    ratio_high: float
    pairs: int
    calls: int
    # Others kept the processors from it: too little was measured to say anything.
    disturbed: bool = field(default=False, kw_only=True)

    @property
    def spread(self) -> str:
        """The interval as text."""
        return f"{self.ratio_low:.4f}..{self.ratio_high:.4f}"

    def line(self, reason: str) -> str:
        """Both medians, the interval, and why it was not faster: a line of the entry's facts."""
        return f"{self.native_ns:.0f} {self.kernel_ns:.0f} {self.spread} {reason}".strip()

    def facts(self) -> dict[str, str]:
        """What else the store is to hold of it."""
        return {}


@contextlib.contextmanager
def machine_to_itself() -> Iterator[None]:
    """Takes turns at timing with this user's other workers on the machine.

    In the block OpenMP's threads spin as they do in callers.
    """
    with turn("timing", TURN_TIMEOUT), idle_threads.spinning():
        yield


def time_on_each(probe: Probe, data: Iterable[Callable[[], None]], margin: float) -> Timing:
    """The timing on the first of ``data``, or on the first where the kernel is not clearly faster.

    Each of ``data`` has the probe hold the call on other data: what native takes may depend on it
    (MKL's logarithm of a negative number takes a hundred times as long as that of a positive one).
    The first is timed in full, the others until it is seen who wins there.
    """
    first: Timing | None = None
    for put in data:
        put()
        found = time_call(probe, None if first is None else 1.0 - margin)
        if not decide(found, margin)[0]:
            return found
        first = first or found
    assert first is not None
    return first


def time_call(probe: Probe, edge: float | None = None) -> Timing:
    """Times both sides in alternating pairs until the budget ends or the interval is narrow.

    Given an ``edge``, also until the ratio is seen to be on one side of it. Only pairs count that
    the scheduler left alone (`scheduler.Watch`) and that are quiet (see `quiet_pairs`); while there
    are too few of them the budget is stretched, up to `NOISY_TIME_BUDGET`, or twice what so few of
    a long call take, up to `LONG_TIME_BUDGET`. Where even that yields too few, the timing says that
    it was disturbed, and decides nothing.
    """
    start = time.monotonic()
    probe.time(1, 1)  # warms both sides, and has their threads started
    with contextlib.closing(Watch()) as watch:
        best = _rough(probe, watch, start)
        stretched = max(NOISY_TIME_BUDGET, 2 * _MINIMUM_PAIRS * sum(best) * 1e-9)
        stretched = min(stretched, LONG_TIME_BUDGET)
        samples = _Samples(probe, watch, max(best))
        quiet: list[tuple[float, float]] = []
        while len(samples.clean) < _MAXIMUM_PAIRS:
            samples.take()
            if not samples.clean and not samples.touched:
                continue  # what it took does not count, and something has to
            quiet = quiet_pairs(samples.clean)
            low, high = _ratio_interval(quiet)
            elapsed = time.monotonic() - start
            if elapsed >= (TIME_BUDGET if len(quiet) >= _MINIMUM_PAIRS else stretched):
                break
            if len(quiet) >= 3 * _MINIMUM_PAIRS and high - low < 0.01:
                break
            if edge is not None and (high <= edge or low > edge) and len(quiet) >= _MINIMUM_PAIRS:
                break
        if len(quiet) < _MINIMUM_PAIRS and samples.touched and watch.alone():
            quiet = quiet_pairs(samples.clean + samples.touched)  # our own threads' waits
    return _judged(quiet, samples)


def _rough(probe: Probe, watch: Watch, start: float) -> list[float]:
    """The best time of either side, from single calls; from undisturbed ones if there are any."""
    best = [math.inf, math.inf]
    for _ in range(_MOST_ROUGH):
        watch.begin()
        pairs = probe.time(3, 1)
        best = [min(best[side], *(pair[side] for pair in pairs)) for side in (0, 1)]
        if watch.undisturbed() or time.monotonic() - start > TIME_BUDGET:
            break
    return best


class _Samples:
    """Pairs (native, kernel) of one call, told apart by whether the scheduler left them alone."""

    def __init__(self, probe: Probe, watch: Watch, slower: float) -> None:
        self.clean: list[tuple[float, float]] = []
        self.touched: list[tuple[float, float]] = []
        self._probe, self._watch = probe, watch
        self._fit(slower)

    def _fit(self, slower: float) -> None:
        """Sets the samples' length for a call whose slower side takes so long."""
        self._slower = slower
        self.calls = _calls_in(_NS_PER_SAMPLE, slower)
        self._shorter = min(self.calls, _calls_in(_NS_PER_SHORT_SAMPLE, slower))
        # Looked at together. The order of the sides alternates from one to the next.
        self._unit = 3 if slower * self.calls * 2 * _PAIRS_PER_ROUND < 2e8 else 1
        self.clean.clear()  # pairs of one length are compared

    def take(self) -> None:
        """A few more. Where most are disturbed, shorter ones fit between two disturbances."""
        self._watch.begin()
        pairs = self._probe.time(self._unit, self.calls)
        (self.clean if self._watch.undisturbed() else self.touched).extend(pairs)
        slower = max(min(side) for side in zip(*pairs, strict=True))
        if slower < self._slower / _FAR_OFF:  # what was thought before was disturbed
            self._fit(slower)
        elif len(self.touched) > len(self.clean) and self.calls > self._shorter:
            self.calls, self._unit = self._shorter, 2
            self.clean.clear()


def _calls_in(nanoseconds: float, each: float) -> int:
    return max(1, min(_MAXIMUM_CALLS, int(nanoseconds / max(each, 1.0))))


def _judged(quiet: Sequence[tuple[float, float]], samples: _Samples) -> Timing:
    """What the ``quiet`` pairs say; where they are too few or cannot be, nothing but best times."""
    shown = list(quiet) or quiet_pairs(samples.touched)
    native = statistics.median(_seen(pair)[0] for pair in shown)
    kernel = statistics.median(_seen(pair)[1] for pair in shown)
    low, high = _ratio_interval(quiet)
    disturbed = len(quiet) < _MINIMUM_PAIRS
    if samples.calls == 1 and all(_is_turns(side) for side in (native, kernel)):
        low, high, disturbed = 0.0, math.inf, True
    return Timing(native, kernel, low, high, len(quiet), samples.calls, disturbed=disturbed)


def _is_turns(nanoseconds: float) -> bool:
    """Whether it is a few turns of the scheduler, of which one or the other clock makes 4 ms."""
    turns = round(nanoseconds / _NS_PER_TURN)
    return 1 <= turns <= _MOST_TURNS and abs(nanoseconds - turns * _NS_PER_TURN) < _TURN_NOISE_NS


def quiet_pairs(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs whose sides are both within `QUIET` of that side's best.

    Other processes can only add to a time, above all where threads wait for each other: on a busy
    machine an OpenMP loop of 50 us was seen to take 10 ms. What is near the best was left alone.
    """
    best_native = min((native for native, _ in pairs), default=0.0)
    best_kernel = min((kernel for _, kernel in pairs), default=0.0)
    return [
        (native, kernel)
        for native, kernel in pairs
        if native <= QUIET * best_native and kernel <= QUIET * best_kernel
    ] or list(pairs)


def _seen(pair: tuple[float, float]) -> tuple[float, float]:
    """(native, kernel) as an unboxed C++ caller sees them."""
    return max(pair[0] - BOXING_ON_NATIVE_NS, 1.0), pair[1] + BOXING_ON_HIT_NS


def _ratio_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """99 % confidence interval of the median of kernel / native.

    It assumes nothing about the distribution. With too few pairs for that confidence it is
    unbounded.
    """
    return median_interval([kernel / native for native, kernel in map(_seen, pairs)])


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """99 % confidence interval of the median of independent ``values``, from order statistics.

    Unbounded where there are too few.
    """
    ratios = sorted(values)
    count = len(ratios)
    if count < _MINIMUM_PAIRS:
        return 0.0, math.inf
    below = math.floor(count / 2 - _CONFIDENCE_Z * math.sqrt(count) / 2)
    below = max(below, 0)
    return ratios[below], ratios[count - 1 - below]


def decide(timing: Timing, margin: float) -> tuple[bool, str]:
    """Whether the kernel is used, and why not: "slower", or "undecided" when noise hides it."""
    if timing.ratio_high <= 1.0 - margin:
        return True, ""
    if timing.ratio_low > 1.0 - margin:
        return False, "slower"
    return False, UNDECIDED
