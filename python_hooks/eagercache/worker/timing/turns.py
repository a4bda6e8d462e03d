"""Turns of this user's workers with what one of them at a time may have."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator


@contextlib.contextmanager
def turn(what: str, timeout: float) -> Iterator[None]:
    """The block's worker alone has ``what`` on this machine, of those that ask.

    The lock is a name in the abstract socket space, which dies with its holder. After ``timeout``
    seconds the caller goes on without it: the holder may not be one of ours.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                lock.bind(f"\0eagercache-{what}-{os.getuid()}")
                break
            except OSError:
                time.sleep(0.02)
        yield
