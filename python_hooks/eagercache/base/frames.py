"""Frames between the service and its workers: four bytes of length, little-endian, then JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

MAX_FRAME_BYTES = 64 << 20
HEAD_BYTES = 4


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next frame, or None at the end of the stream. Raises ValueError on a malformed one."""
    head = _read_exactly(stream, HEAD_BYTES)
    body = _read_exactly(stream, body_bytes(head)) if head is not None else None
    return frame_of(body) if body is not None else None


def body_bytes(head: bytes) -> int:
    """How long the frame is that begins so. Raises ValueError for one that is too long."""
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def frame_of(body: bytes) -> dict[str, Any]:
    """What a frame says. Raises ValueError for a malformed one."""
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("a frame that is not an object")  # noqa: TRY004 - it is the data
    return frame


def _read_exactly(stream: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count > 0:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_frame(stream: IO[bytes], frame: Mapping[str, Any]) -> None:
    """Writes one frame and flushes."""
    body = json.dumps(frame).encode()
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()
