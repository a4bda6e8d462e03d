"""What of the machine is in use right now."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def busy_share(seconds: float) -> float:
    """Of all processors, the share that was in use in the next ``seconds``; 1.0 if unknown."""
    before = _processor_times()
    time.sleep(seconds)
    after = _processor_times()
    if before is None or after is None or after[1] <= before[1]:
        return 1.0
    return (after[0] - before[0]) / (after[1] - before[1])


def _processor_times() -> tuple[int, int] | None:
    """Ticks in use, and all ticks, of all processors since the boot."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
        ticks = [int(word) for word in line.split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    idle = sum(ticks[3:5])  # idle, and waiting for a disk
    return sum(ticks) - idle, sum(ticks)


def free_bytes() -> int:
    """What of the machine's memory, and of this process's cgroup, can be had without swapping."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, StopIteration):
        named = Path("/proc/self/cgroup").read_text().splitlines()
        name = next(line[3:] for line in named if line.startswith("0::"))
        group = Path("/sys/fs/cgroup") / name.lstrip("/")
        used = int((group / "memory.current").read_text())
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free
