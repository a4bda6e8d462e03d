"""The service's end of the pipes to a worker, with an end to every wait.

A worker may be stopped, or may die in the middle of a frame while a child of its holds the pipe
open. The frames are those of base/frames.py.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from eagercache.base.frames import HEAD_BYTES, MAX_FRAME_BYTES, body_bytes, frame_of

# Workers write frames whole: what follows a frame's first bytes is there at once.
FRAME_SECONDS = 30.0
# Between looks at a clock that may stand still shortly before a deadline.
_LEAST_SECONDS = 0.01


class PipeTimeout(Exception):
    """The other end did not move in time."""


class WorkerPipe:
    """Writes to one descriptor and reads from another, which stay the caller's. One thread's.

    Deadlines are of ``clock``, which may stand still while the other end is stopped.
    """

    def __init__(
        self, requests: int, answers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = requests
        self._answers = answers
        self._clock = clock
        for descriptor in (requests, answers):
            os.set_blocking(descriptor, False)

    def write(self, frame: Mapping[str, Any], seconds: float) -> None:
        """Writes a frame within ``seconds``. Raises PipeTimeout, OSError; ValueError: too large."""
        body = json.dumps(frame).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a request of {len(body) >> 20} MiB is more than a worker takes")
        left = memoryview(len(body).to_bytes(4, "little") + body)
        deadline = self._clock() + seconds
        while left:
            self._wait(self._requests, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._requests, left) :]
            except BlockingIOError:
                continue

    def read(self, seconds: float) -> dict[str, Any] | None:
        """The next frame, whose beginning comes within ``seconds``; None at the end of the stream.

        Raises PipeTimeout, OSError; ValueError on a malformed frame.
        """
        head = self._exactly(HEAD_BYTES, self._clock() + seconds)
        if head is None:
            return None
        body = self._exactly(body_bytes(head), self._clock() + FRAME_SECONDS)
        return frame_of(body) if body is not None else None

    def _exactly(self, count: int, deadline: float) -> bytes | None:
        parts: list[bytes] = []
        while count > 0:
            self._wait(self._answers, select.POLLIN, deadline)
            try:
                part = os.read(self._answers, min(count, 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        # Looks once more after the deadline: this process may have been stopped meanwhile.
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(max(_LEAST_SECONDS, deadline - self._clock()) * 1000):
            if self._clock() >= deadline:
                raise PipeTimeout
