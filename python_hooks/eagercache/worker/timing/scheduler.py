"""Whether this process was left alone by the scheduler while something was timed.

A call that runs on several threads takes as long as the last of them, so a thread that waits for a
processor adds whole turns of the scheduler, milliseconds, to a call of microseconds. Near-alike
times are then no sign of truth: both sides of a pair wait alike. Linux counts, for each thread,
the nanoseconds that it was ready and did not run (schedstat), and that tells.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

# What all threads together may have waited: their own waking up takes some microseconds.
_WAITED_SHARE = 0.02
_WAITED_NS = 5_000
# Of the machine's processors together, what others may use where our own threads wait for each
# other, as where a program has more of them than there are processors.
_OTHERS_SHARE = 0.05
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Watch:
    """Looks at the threads that this process has when it is made. Holds a file for each."""

    def __init__(self) -> None:
        self._files: list[int] = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended; no such file
                self._files.append(os.open(task / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
        # Without schedstat all are zero or missing: then turns that others took are counted.
        self._counts_time = self._waited() > 0
        self._start = self._begin = time.perf_counter_ns()
        self._before = self._count()
        self._machine = _machine_ns()
        self._own = time.process_time_ns()

    def close(self) -> None:
        """Lets go of the files."""
        while self._files:
            os.close(self._files.pop())

    def begin(self) -> None:
        """What `undisturbed` is about begins now."""
        self._before = self._count()
        self._begin = time.perf_counter_ns()

    def undisturbed(self) -> bool:
        """Whether no thread had to wait for a processor since `begin`."""
        elapsed = time.perf_counter_ns() - self._begin
        more = self._count() - self._before
        if not self._counts_time:
            return more == 0
        return more <= max(_WAITED_NS, _WAITED_SHARE * elapsed)

    def alone(self) -> bool:
        """Whether others used next to nothing since this was made: waits are then our own."""
        elapsed = time.perf_counter_ns() - self._start
        if self._machine is None or (now := _machine_ns()) is None:
            return False
        others = now - self._machine - (time.process_time_ns() - self._own)
        # Two ticks: what was begun before, and how coarsely the machine's time is counted.
        return others <= _OTHERS_SHARE * elapsed * (os.cpu_count() or 1) + 2 * _NS_PER_TICK

    def _count(self) -> int:
        if self._counts_time:
            return self._waited()
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def _waited(self) -> int:
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                total += int(os.pread(file, 128, 0).split()[1])
        return total


def _machine_ns() -> int | None:
    """What all processors were used for, by the hypervisor's other guests too; None if unknown."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) * _NS_PER_TICK
