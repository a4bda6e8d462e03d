"""How many workers may run at once: as many as the program leaves processors.

Where program and worker want one processor the worker gets a twentieth of it. A parallel region
ends with its last thread, though, and so waits for each worker that runs beside one of them: since
Linux 6.6 a thread that wakes waits for the rest of a nicer one's slice, of some milliseconds, but
never for one of SCHED_IDLE (bench/results/2026-11-27-beside-programs-h100.md).
"""

from __future__ import annotations

import contextlib
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
# A program that uses so much of its control group's quota would be throttled for a worker.
_FULL_SHARE = 0.85
# Processors that are left over on average, so that one is at nearly any time.
_LEAST_SPARE = 1.5


class Pace:
    """Says how many workers may run now, and whether they can be of the lowest kind. Thread-safe.

    ``clock`` is that of `time.monotonic`, ``threads`` gives seconds on a processor by thread, and
    ``spare`` seconds in which processors had nothing better to do. ``quota`` is how many processors
    this process's control group may use, where that is limited.
    """

    def __init__(
        self,
        cores: int,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[], Mapping[str, float]] | None = None,
        *,
        spare: Callable[[], float] | None = None,
        quota: float | None = None,
    ) -> None:
        self._cores = cores if quota is None else max(1, min(cores, int(quota)))
        self._quota = quota
        self._clock = clock
        self._threads = threads or thread_seconds
        self._spare = spare or spare_seconds
        self._lock = threading.Lock()
        self._sampled = clock()
        self._seconds = dict(self._threads())
        self._spared = self._spare()
        self._allowed = 1
        self._has_room = True
        self._left_over = 0
        self._knows = False

    def wait_until_known(self, rest: Callable[[float], None] = time.sleep) -> None:
        """Returns once a first sample can be taken, which is at once but for the first second."""
        with self._lock:
            left = 0.0 if self._knows else self._sampled + SAMPLE_SECONDS - self._clock()
        if left > 0.0:
            rest(left)

    def allowed(self) -> int:
        """One until a first sample has been taken. None only where the program uses its quota."""
        with self._lock:
            self._sample_locked()
            return self._allowed

    def has_room(self) -> bool:
        """Whether a processor is left, so that also what others always come before has its turn.

        Taken for granted until a first sample has been taken.
        """
        with self._lock:
            self._sample_locked()
            return self._has_room

    def left_over(self) -> int:
        """Processors that had nothing better to do, on average; 0 until a first sample was taken.

        The threads of a program's parallel regions are many more than the processors that they
        take: so many processes can run beside them that always let them go first.
        """
        with self._lock:
            self._sample_locked()
            return self._left_over if self._allowed else 0

    def _sample_locked(self) -> None:
        passed = self._clock() - self._sampled
        if passed < SAMPLE_SECONDS:
            return
        seconds, spared = dict(self._threads()), self._spare()
        used = [now - self._seconds.get(name, 0.0) for name, now in seconds.items()]
        active = sum(ran >= _ACTIVE_SHARE * passed for ran in used)
        # A quota is shared out to whoever runs first, nice or not.
        full = self._quota is not None and sum(used) >= _FULL_SHARE * self._quota * passed
        self._allowed = 0 if full else max(1, self._cores - active)
        self._has_room = spared - self._spared >= _LEAST_SPARE * passed
        self._left_over = min(self._cores, int((spared - self._spared) / passed))
        self._sampled, self._seconds, self._spared = self._clock(), seconds, spared
        self._knows = True


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


def spare_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Since the boot, what this process's processors were idle for, or had only what is nice.

    What is nice counts where this process is not: its workers are nicer.
    """
    columns = (1, 3, 4) if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else (3, 4)
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in stat.read_text().splitlines():
            name, *words = line.split()
            if name in allowed:  # user, nice, system, idle, waiting for a disk (proc(5))
                ticks += sum(int(words[column]) for column in columns)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_quota(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Processors that this process's control group may use, or one above it; None without a limit.

    The files are those of cgroups(7): cpu.max of version 2, cpu.cfs_quota_us of version 1.
    """
    found: list[float] = []
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / controllers if controllers else root
            folder = top / name.lstrip("/")
            # In a container the name may be one that is not seen there; the root is its own then.
            while folder.is_relative_to(top):
                found += _quota_of(folder)
                folder = folder.parent
    return min(found, default=None)


def _quota_of(folder: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        allowed = int((folder / "cpu.cfs_quota_us").read_text())
        return [allowed / int((folder / "cpu.cfs_period_us").read_text())] if allowed > 0 else []
    return []
