"""The lingering process: ``python -m eagercache.service.linger_main STORE SECONDS LOCK``.

It goes on with the pending requests of a store whose program has ended, and ends when none is left,
after so many seconds, or when it is told to. LOCK is the descriptor that holds the store's lock.

It takes only what nobody else wants: it waits while the machine is busy, ends where memory is
short, is on a GPU only while no program is, and has the lowest priority, inside its session and
between sessions.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from eagercache.base import config, environment, facts
from eagercache.base.load import core
from eagercache.base.worker_environment import add_late_paths
from eagercache.service import lingering
from eagercache.service.cuda_gate import bytes_wanted
from eagercache.service.idle_gpu import LOOK_SECONDS, IdleGpu
from eagercache.service.machine import busy_share, free_bytes
from eagercache.service.pending import PendingFolder, PendingRequest
from eagercache.service.pending_work import PendingWork
from eagercache.service.service import CompileService
from eagercache.service.settings import IDLE_SHARE, ServiceSettings, for_gpu

# Requests that are handed out before it is asked again whether the machine is idle.
GROUP = 16
# Free memory that is left to others; a worker is a gigabyte.
LEAST_FREE_BYTES = 3 << 30
# A last resort, by a timer of the kernel's.
_GRACE_SECONDS = 60
_SAMPLE_SECONDS = 1.0
_MEMORY_LOOKS = 3
_BUSY_SECONDS = 5.0
_NICEST = 19


class _Told(BaseException):
    """A signal told this process to end."""


def give_way() -> None:
    """The lowest priority, between sessions (sched_autogroup) and inside of this one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICEST))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Lingerer:
    """The process's work, until `end` (of `time.monotonic`)."""

    def __init__(self, store_root: str, end: float, lock: int, *, whatever_the_load: bool) -> None:
        self._root = store_root
        self._end = end
        self._lock = lock
        self._whatever_the_load = whatever_the_load
        self._said = ""
        self._gpus: dict[str, IdleGpu] = {}
        self._on = ("", 0)  # the GPU that it is at, and what was done when it began there

    def run(self) -> None:
        """Returns when nothing is left, or the time is over."""
        self._say("starts")
        work = self._make_work()
        asked = False
        try:
            while work.run(lambda left: self._choose(work, left), lambda: self._is_over(work)):
                # Whoever leaves requests while the lock is held relies on them being seen.
                lingering.unlock(self._lock)
                if not work.left() or not lingering.lock(self._lock):
                    return
        except _Told:
            asked = True
        finally:
            work.close(asked=asked)

    def _make_work(self) -> PendingWork:
        assert core is not None
        settings = config.read_settings()
        text = environment.environment_text(cxx=settings.cxx, facts=facts.Facts(Path(self._root)))
        store = core.Store(self._root, text, read_only=True, revoked=settings.revoked_text)
        for_cpu = ServiceSettings(
            store_root=self._root,
            environment=text,
            workers=1,
            slots=settings.slots,
            cxx=settings.cxx,
            max_bytes=settings.max_bytes,
            revoked=settings.revoked_text,
        )
        return PendingWork(
            PendingFolder(self._root),
            text,
            store,
            lambda gpu: CompileService(for_gpu(for_cpu, 0, gpu) if gpu else for_cpu),
        )

    def _over(self) -> bool:
        return time.monotonic() >= self._end

    def _is_over(self, work: PendingWork) -> bool:
        """Asked while workers are at it: programs that come have their GPUs to themselves."""
        self._give_way(work)
        return self._over()

    def _give_way(self, work: PendingWork) -> None:
        """Leaves GPUs to programs that came, and those where they could not be seen."""
        for uuid, gpu in self._gpus.items():
            groups = work.workers_on(uuid)
            if not groups:
                continue
            answered = self._on[0] == uuid and work.done > self._on[1]
            if gpu.is_wanted(groups) or gpu.cannot_see(answered=answered):
                work.leave(uuid)

    def _choose(self, work: PendingWork, left: list[PendingRequest]) -> list[PendingRequest]:
        """Waits for an idle machine, and of GPUs for one that nobody uses; then the next requests.

        Nothing once the time is over, where memory is short, or where no GPU can be had. A process
        that waits for memory has some of it.
        """
        short_of_memory = 0
        while not self._over() and short_of_memory < _MEMORY_LOOKS:
            if free_bytes() < LEAST_FREE_BYTES:
                short_of_memory += 1  # the program may not have ended yet
            elif not self._whatever_the_load and busy_share(_SAMPLE_SECONDS) > IDLE_SHARE:
                self._say("waits for an idle machine")
            else:
                self._give_way(work)
                possible = [one for one in left if self._could_have(one)]
                chosen = next((one for one in possible if self._is_free_for(work, one)), None)
                if chosen is not None:
                    self._on = (chosen.gpu, work.done)
                    self._say(f"compiles: {work.done} of {work.total} requests done")
                    together = [one for one in possible if one.gpu == chosen.gpu]
                    return [one for one in together if self._is_free_for(work, one)][:GROUP]
                if not possible:
                    return []
                self._say("waits for a GPU")
            self._rest(work)
            left = work.left()  # who ended meanwhile relies on this process
        return []

    def _rest(self, work: PendingWork) -> None:
        end = time.monotonic() + _BUSY_SECONDS
        while time.monotonic() < min(end, self._end):
            self._give_way(work)
            time.sleep(min(_BUSY_SECONDS, LOOK_SECONDS))

    def _gpu(self, uuid: str) -> IdleGpu:
        return self._gpus.setdefault(uuid, IdleGpu(uuid))

    def _could_have(self, request: PendingRequest) -> bool:
        if not request.gpu:
            return True
        return self._gpu(request.gpu).could_have(bytes_wanted(request.description))

    def _is_free_for(self, work: PendingWork, request: PendingRequest) -> bool:
        if not request.gpu:
            return True
        groups = work.workers_on(request.gpu)
        return self._gpu(request.gpu).is_free_for(bytes_wanted(request.description), groups)

    def _say(self, does: str) -> None:
        if does != self._said:
            self._said = does
            lingering.note_status(self._root, os.getpid(), does)


def _tell(*_: object) -> NoReturn:
    raise _Told


def main(arguments: list[str]) -> None:
    """Lingers. `--whatever-the-load` before the others is for tests."""
    whatever_the_load = "--whatever-the-load" in arguments
    store_root, seconds, lock = arguments[-3:]
    end = time.monotonic() + float(seconds)
    os.set_inheritable(int(lock), False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.alarm(int(float(seconds)) + _GRACE_SECONDS)
    give_way()
    add_late_paths(os.environ)
    signal.signal(signal.SIGTERM, _tell)
    try:
        Lingerer(store_root, end, int(lock), whatever_the_load=whatever_the_load).run()
    finally:
        os._exit(0)  # skips torch's teardown


if __name__ == "__main__":
    main(sys.argv[1:])
