"""Permission to compile, shared by all processes of a user on a machine.

Eight ranks of one job must not start eight times as many compilers. A slot is a file that is locked
while its holder compiles; the lock goes with the process. Nobody waits for one: `try_take` says no.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

# The same for all processes of a user, whatever their TMPDIR.
_SHARED_FOLDER = Path("/tmp")


class Slot:
    """A held slot. `release` may be called more than once."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets the next one compile."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                # A child that was forked meanwhile has the file open too: closing is not enough.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class Slots:
    """``count`` slots in ``folder``, which is made when it is missing.

    Where the folder cannot be trusted (another owner, a link, others may write) there is no limit
    between processes, and every `try_take` succeeds.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self.count = count
        self.folder = folder or _SHARED_FOLDER / f"eagercache-{os.getuid()}"

    def try_take(self) -> Slot | None:
        """A free slot, or None when all are taken. Never waits."""
        if not self._usable():
            return Slot(None)
        for number in range(self.count):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                descriptor = os.open(self.folder / f"slot-{number}", flags, 0o600)
            except OSError:
                return Slot(None)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
            else:
                return Slot(descriptor)
        return None

    def _usable(self) -> bool:
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            status = self.folder.lstat()
            private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
            return private and status.st_uid == os.getuid()
        return False
