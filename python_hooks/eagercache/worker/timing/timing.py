"""Whether a kernel is faster than native: timing through `_C.Probe`, and the decision."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from eagercache.worker.timing import idle_threads

# The probe times boxed C++ calls on both sides. A C++ caller reaches native unboxed and the hook
# through a boxing step; the difference is the median over the operators of measured.md section 4
# (rows "stock", "boxed hook straight to native" and "unboxed hook straight to native").
BOXING_ON_HIT_NS = 60.0
BOXING_ON_NATIVE_NS = 60.0

TIME_BUDGET = 0.5  # seconds of timing a call
NOISY_TIME_BUDGET = 3.0  # the same, while other processes disturb it
LONG_TIME_BUDGET = 60.0  # the same at most, of a call that takes so long that it needs more
TURN_TIMEOUT = 30.0  # seconds to wait for another worker's timing to end
QUIET = 1.5
_PAIRS_PER_ROUND = 9
_MINIMUM_PAIRS = 9
_MAXIMUM_PAIRS = 99
_NS_PER_SAMPLE = 400_000.0  # of one side of one pair; far above the clock's resolution
_MAXIMUM_CALLS = 2_000
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

    The lock is a name in the abstract socket space, which dies with its holder. After
    `TURN_TIMEOUT` seconds the caller goes on without it: the holder may not be one of ours. In the
    block OpenMP's threads spin as they do in callers.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        deadline = time.monotonic() + TURN_TIMEOUT
        while time.monotonic() < deadline:
            try:
                turn.bind(f"\0eagercache-timing-{os.getuid()}")
                break
            except OSError:
                time.sleep(0.02)
        with idle_threads.spinning():
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

    Given an ``edge``, also until the ratio is seen to be on one side of it. Only quiet pairs
    count (see `quiet_pairs`); while there are too few of them the budget is stretched, up to
    `NOISY_TIME_BUDGET`, or twice what so few of a long call take, up to `LONG_TIME_BUDGET`.
    """
    start = time.monotonic()
    rough = probe.time(4, 1)[1:]  # the first pair warms both sides
    best = [min(pair[side] for pair in rough) for side in (0, 1)]
    slower = max(best)
    stretched = max(NOISY_TIME_BUDGET, 2 * _MINIMUM_PAIRS * sum(best) * 1e-9)
    stretched = min(stretched, LONG_TIME_BUDGET)
    calls = max(1, min(_MAXIMUM_CALLS, int(_NS_PER_SAMPLE / max(slower, 1.0))))
    size = _PAIRS_PER_ROUND if slower * calls * 2 * _PAIRS_PER_ROUND < 2e8 else 3
    pairs: list[tuple[float, float]] = []
    quiet: list[tuple[float, float]] = []
    while len(pairs) < _MAXIMUM_PAIRS:
        pairs.extend(probe.time(size, calls))
        quiet = quiet_pairs(pairs)
        low, high = _ratio_interval(quiet)
        elapsed = time.monotonic() - start
        if elapsed >= (TIME_BUDGET if len(quiet) >= _MINIMUM_PAIRS else stretched):
            break
        if len(quiet) >= 3 * _MINIMUM_PAIRS and high - low < 0.01:
            break
        if edge is not None and (high <= edge or low > edge) and len(quiet) >= _MINIMUM_PAIRS:
            break
    low, high = _ratio_interval(quiet)
    return Timing(
        native_ns=statistics.median(_seen(pair)[0] for pair in quiet),
        kernel_ns=statistics.median(_seen(pair)[1] for pair in quiet),
        ratio_low=low,
        ratio_high=high,
        pairs=len(quiet),
        calls=calls,
    )


def quiet_pairs(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs whose sides are both within `QUIET` of that side's best.

    Other processes can only add to a time, above all where threads wait for each other: on a busy
    machine an OpenMP loop of 50 us was seen to take 10 ms. What is near the best was left alone.
    """
    best_native = min(native for native, _ in pairs)
    best_kernel = min(kernel for _, kernel in pairs)
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
