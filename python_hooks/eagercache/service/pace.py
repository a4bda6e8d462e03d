"""How many workers may run at once: as many as the program leaves processors.

Where program and worker want one processor the worker gets a twentieth of it. A parallel region
ends with its last thread, though, and so waits for each worker that runs beside one of them
(bench/results/2026-11-26-beside-programs-h100.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_TASKS = Path("/proc/self/task")
_CORES = Path("/sys/devices/system/cpu")
# Between samples of what the program's threads do.
SAMPLE_SECONDS = 1.0
# A thread that ran for so much of a sample has its processor: workers of a parallel region run now
# and then, all of them at once.
_ACTIVE_SHARE = 0.05


class Pace:
    """Says how many workers may run now. Thread-safe.

    ``clock`` is that of `time.monotonic`, and ``threads`` gives seconds on a processor by thread.
    """

    def __init__(
        self,
        cores: int,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._cores = cores
        self._clock = clock
        self._threads = threads or thread_seconds
        self._lock = threading.Lock()
        self._sampled = clock()
        self._seconds = dict(self._threads())
        self._allowed = 1

    def allowed(self) -> int:
        """At least one; one until a first sample has been taken."""
        with self._lock:
            passed = self._clock() - self._sampled
            if passed >= SAMPLE_SECONDS:
                seconds = dict(self._threads())
                used = (now - self._seconds.get(name, 0.0) for name, now in seconds.items())
                active = sum(ran >= _ACTIVE_SHARE * passed for ran in used)
                self._allowed = max(1, self._cores - active)
                self._sampled, self._seconds = self._clock(), seconds
            return self._allowed


def thread_seconds(tasks: Path = _TASKS) -> dict[str, float]:
    """What each thread of this process has had of a processor, by its number."""
    found = {}
    try:
        numbers = [entry.name for entry in tasks.iterdir()]
    except OSError:
        return {}
    for number in numbers:
        try:
            found[number] = int((tasks / number / "schedstat").read_text().split()[0]) * 1e-9
        except (OSError, ValueError, IndexError):
            continue  # ended meanwhile, or a system without these figures
    return found


def physical_cores(folder: Path = _CORES) -> int:
    """Cores behind the processors that this process may use: two threads of one share it."""
    processors = os.sched_getaffinity(0)
    seen = set()
    for number in processors:
        try:
            text = (folder / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            return len(processors)
        seen.add(text.strip())
    return max(1, len(seen))
