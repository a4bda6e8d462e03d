"""Kernels of this process whose answer was found to differ from native's (`EAGERCACHE_VERIFY`)."""

from __future__ import annotations

from collections import deque
from typing import Any

from eagercache.base import structured_trace

# Each is a kernel that is put aside for good: a process that finds so many has found enough.
MOST = 1000

_found: deque[dict[str, str]] = deque(maxlen=MOST)


def note(digest: str, reason: str, op: str = "") -> None:
    """Remembers one, and puts it into torch's structured trace. Any thread."""
    fields: dict[str, Any] = {"op": op, "digest": digest, "reason": reason}
    _found.append(fields)
    structured_trace.note("quarantine", fields)


def found() -> list[dict[str, str]]:
    """Those of this process: "op" ("" where only the digest is known), "digest", "reason"."""
    return list(_found)
