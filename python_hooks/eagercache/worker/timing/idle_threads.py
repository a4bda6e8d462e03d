"""Keeps OpenMP's idle threads asleep while a worker does other things than timing.

After a parallel loop libgomp's threads spin for 300,000 rounds (some milliseconds) in case another
one follows. In a caller's tight loop that is what makes the next one quick, and a timing must see
it; between the samples of a proof it burns several times what the proof itself takes. libgomp spins
a hundred rounds while a process has more OpenMP threads than processors, whoever they belong to:
so a thread of ours holds a team of that size, which does nothing, and lets go of it for timings.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path


class _Team:
    """A thread that holds idle OpenMP threads until `release`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._is_there, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, name="eagercache-idle", daemon=True)
        self._thread.start()
        self._is_there.wait()

    def _hold(self) -> None:
        # Every thread of the team calls free(NULL), which does nothing.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
        self._is_there.set()
        self._ends.wait()

    def release(self) -> None:
        """Ends the thread; libgomp ends its team with it."""
        self._ends.set()
        self._thread.join()


_team: _Team | None = None


def keep_asleep() -> None:
    """From now on idle threads of OpenMP sleep, in this process. Without libgomp, nothing happens.

    One thread of a process may call this and `spinning`.
    """
    global _team
    if _team is None and (library := _libgomp()) is not None:
        _team = _Team(library)


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Idle threads of OpenMP spin in the block, as in any other process."""
    global _team
    held, _team = _team, None
    if held is not None:
        held.release()
    try:
        yield
    finally:
        if held is not None:
            keep_asleep()


def _libgomp() -> ctypes.CDLL | None:
    """The copy of it that torch loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if Path(path).name.startswith("libgomp"):
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [
                *(ctypes.c_void_p, ctypes.c_void_p),
                *(ctypes.c_uint, ctypes.c_uint),
            ]
            return library
    return None
