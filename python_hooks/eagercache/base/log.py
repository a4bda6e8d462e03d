"""Events as lines on standard error: the Python half of what `EAGERCACHE_LOG` switches on.

`dispatcher/base/log.h` is the other half; both write "eagercache: LEVEL: event=NAME FIELD=VALUE
...", a line at a time, so that a program's events can be had with grep.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re

LOGGER = logging.getLogger("eagercache")

_LEVELS = {
    "off": logging.CRITICAL + 1,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_NEEDS_QUOTES = re.compile(r"[\s\"=]")
_CONTROL = re.compile(r"[\x00-\x1f]")


def event(level: int, name: str, **fields: object) -> None:
    """Logs that something happened. Fields that are None or empty are left out."""
    if not LOGGER.isEnabledFor(level):
        return
    parts = [f"event={name}"]
    for field, value in fields.items():
        text = "" if value is None else str(value)
        if text:
            parts.append(f"{field}={_quoted(text)}")
    LOGGER.log(level, "%s", " ".join(parts))


def _quoted(text: str) -> str:
    if not _NEEDS_QUOTES.search(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_CONTROL.sub(" ", escaped)}"'


class _StandardError(logging.Handler):
    """One write(2) a line, past sys.stderr: lines of several threads and processes do not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        text = _CONTROL.sub(" ", record.getMessage())
        line = f"eagercache: {record.levelname.lower()}: {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))


_HANDLER = _StandardError()


def set_level(name: str) -> None:
    """Applies EAGERCACHE_LOG's value. A program's own logging handlers get the same records."""
    LOGGER.setLevel(_LEVELS[name])
    if _HANDLER not in LOGGER.handlers:
        LOGGER.addHandler(_HANDLER)
