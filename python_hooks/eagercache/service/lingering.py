"""The process that goes on with pending requests once their program has ended, seen from outside.

There is at most one for a store: it holds a lock on a file of the folder PENDING. The lock is one
of an open file description. So a program that ends takes it, and hands it to the process that it
starts; and to see whether it is held disturbs nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagercache.base import config, private_file
from eagercache.base.log import event
from eagercache.base.worker_environment import START_FOLDER
from eagercache.base.worker_variables import program_variables
from eagercache.service.pending import PendingFolder
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import worker_environment

SECONDS = 600.0  # what EAGERCACHE_LINGER is by default
LOCK = "LOCK"
STATUS = "STATUS"
# What is started; tests have others.
COMMAND = ("-m", "eagercache.service.linger_main")

_FLOCK = "hhqqi4x"  # struct flock on x86-64


@dataclass(frozen=True)
class Lingering:
    """A lingering process. ``pid`` is 0 where it cannot be told."""

    pid: int
    does: str


def take_lock(folder: Path) -> int | None:
    """A descriptor that holds the lock; None where another process has it."""
    descriptor = _open(folder, os.O_CREAT)
    if descriptor is None:
        return None
    if not lock(descriptor):
        os.close(descriptor)
        return None
    return descriptor


def lock(descriptor: int) -> bool:
    """Takes the lock with a descriptor that `take_lock` gave; whether it is held now."""
    return _set_lock(descriptor, fcntl.F_WRLCK)


def unlock(descriptor: int) -> None:
    """Gives the lock away and keeps the descriptor."""
    _set_lock(descriptor, fcntl.F_UNLCK)


def running(store_root: str | Path) -> Lingering | None:
    """The lingering process of a store."""
    folder = PendingFolder(store_root).path
    if not _is_held(folder):
        return None
    known = private_file.read(folder, STATUS)
    if not isinstance(known, dict) or not isinstance(known.get("pid"), int):
        return Lingering(0, "starts")
    if known.get("born") != _birth(known["pid"]):  # of one that ended before
        return Lingering(0, "starts")
    return Lingering(known["pid"], str(known.get("does", ""))[:200])


def note_status(store_root: str | Path, pid: int, does: str) -> None:
    """Says who lingers, for `running`."""
    folder = PendingFolder(store_root).path
    private_file.write(folder, STATUS, {"pid": pid, "born": _birth(pid), "does": does})


def start(settings: ServiceSettings, seconds: float) -> int | None:
    """Starts the lingering process of a store, where there is none; its number.

    It holds nothing of this process: neither the terminal nor standard output, folder or session.
    """
    folder = PendingFolder(settings.store_root)
    descriptor = take_lock(folder.path) if sys.executable and folder.make() else None
    if descriptor is None:
        return None
    try:
        command = [sys.executable, *COMMAND, settings.store_root, f"{seconds:g}", str(descriptor)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(settings, os.environ),
            cwd=START_FOLDER,
            umask=0o077,
            start_new_session=True,
            pass_fds=[descriptor],
        )
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        event(logging.INFO, "linger_failed", reason=error)
        return None
    finally:
        os.close(descriptor)
    process.returncode = 0  # nobody waits for it, which Popen would warn about
    note_status(settings.store_root, process.pid, "starts")
    event(logging.INFO, "linger", pid=process.pid, seconds=f"{seconds:g}")
    return process.pid


def stop(store_root: str | Path, timeout: float = 5.0) -> bool:
    """Ends the lingering process of a store; whether there is none any more."""
    folder = PendingFolder(store_root).path
    end = time.monotonic() + timeout
    while (found := running(store_root)) is not None and time.monotonic() < end:
        if found.pid:
            _end(found.pid, store_root, max(0.1, end - time.monotonic()))
        time.sleep(0.02)
    return not _is_held(folder)


def _end(pid: int, store_root: str | Path, seconds: float) -> None:
    """First politely. A number that is another process's by now is left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            still = running(store_root)
            if still is None or still.pid != pid:
                return
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            if not select.select([descriptor], [], [], seconds / 2)[0]:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], seconds / 2)
        finally:
            os.close(descriptor)


def _environment(settings: ServiceSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """A worker's, what the program's own code may ask for, and our settings."""
    ours = {v.name: environ[v.name] for v in config.VARIABLES if v.name in environ}
    made = {**program_variables(environ), **worker_environment(settings, environ), **ours}
    del made[config.WORKER_VARIABLE]
    return made


def _open(folder: Path, flags: int = 0) -> int | None:
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(folder / LOCK, flags, 0o600)
    except OSError:
        return None


def _set_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0))
    except OSError:  # held, or a file system without such locks
        return False
    return True


def _is_held(folder: Path) -> bool:
    descriptor = _open(folder)
    if descriptor is None:
        return False
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer: Any = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _birth(pid: int) -> str | None:
    """When a process was started, which with its number names it until the next boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{fields[19]} {boot}"
