"""A compile worker that wakes when its program is gone, from its first moments on.

The package asks for it before it imports torch, which takes seconds: a worker that is stopped
meanwhile would stay for ever. From `worker.main` on it is that which says what is done then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def wake_when_parent_dies() -> None:
    """Has the kernel send SIGCONT when the thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def end_when_parent_dies() -> None:
    """As `wake_when_parent_dies`; the process ends at once, with whatever it imports unfinished."""
    parent = os.getppid()

    def continued(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    with contextlib.suppress(ValueError):  # not on the main thread: then it wakes alone
        signal.signal(signal.SIGCONT, continued)
    wake_when_parent_dies()
