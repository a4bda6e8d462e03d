"""What a process holds in memory of a file that it mapped."""

from __future__ import annotations

import re
from pathlib import Path


def pages_of(pid: int, path: Path) -> dict[str, int]:
    """KiB of a process's mappings of a file, by kind, as /proc/PID/smaps names them."""
    sums: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.endswith(" kB"):
            name, value = line.split(":")
            sums[name] = sums.get(name, 0) + int(value.split()[0])
    return sums
