"""What ends a compile worker with its program, in whatever state the worker is.

A worker that is stopped runs no code of its own that could notice. So the kernel is told what to do
beforehand: a pipe, whose one end only the program has, and whose other end sends SIGKILL to the
worker's process group when the first is closed, as the kernel does for a process that ends
(fcntl(2), F_SETSIG and F_SETOWN of a process group; open(2), O_ASYNC).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import weakref

# Of Linux; Python's fcntl knows the others.
_F_SETSIG = 10

_tied: weakref.WeakSet[Tether] = weakref.WeakSet()


class Tether:
    """One such pipe. `far` is for the worker, which only has to keep it.

    It lives as long as the object; a forked child has no part of it.
    """

    def __init__(self) -> None:
        self.far, near = os.pipe()
        self._near = os.fdopen(near, "wb", buffering=0)
        _tied.add(self)

    def tie(self, group: int) -> None:
        """From now on the process group ends with this process.

        Where the system has no such means nothing is done: a worker that runs also looks for its
        program itself.
        """
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.far, fcntl.F_SETOWN, -group)
            fcntl.fcntl(self.far, _F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(self.far, fcntl.F_GETFL)
            fcntl.fcntl(self.far, fcntl.F_SETFL, flags | os.O_ASYNC)

    def let_go_of_far_end(self) -> None:
        """The worker has it now, or there will be none."""
        os.close(self.far)
        self.far = -1

    def close_in_child(self) -> None:
        """In a fork of the program, which may outlive it."""
        self._near.close()


def _after_fork_in_child() -> None:
    for tether in list(_tied):
        tether.close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
