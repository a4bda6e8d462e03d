"""A compile worker that wakes when its program is gone, from its first moments on.

The package asks for it before it imports torch, which takes seconds: a worker that is stopped
meanwhile would stay for ever. What it does when it wakes is in `worker.main`.
"""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def wake_when_parent_dies() -> None:
    """Has the kernel send SIGCONT when the thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
