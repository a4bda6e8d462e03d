"""`wait`: until nothing is compiled; on a terminal it says what it waits for."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from eagercache.base.load import core
from eagercache.base.operators import described_name
from eagercache.calls.texts import counted
from eagercache.frontend.deferred import deferred
from eagercache.runtime.session import session

# Waits that are shorter show nothing.
_QUIET_SECONDS = 0.5
_MOST_NAMES = 3
# What rich puts before the text, and a place that terminals need to stay in the line.
_SPINNER_WIDTH = 3


def wait(timeout: float | None = None) -> bool:
    """Waits until no key is queued or being compiled, and no self-check of the import's runs.

    Where standard error is a terminal a line there says what is compiled, and is gone at the end.

    Returns True when that is so, False after `timeout` seconds.
    """
    if timeout is not None and not isinstance(timeout, (int, float)):
        raise TypeError(f"wait(timeout={timeout!r}): use a number of seconds, or None for no limit")
    if core is None or core.forked():
        return True
    end = None if timeout is None else time.monotonic() + timeout
    with _Line() as line:
        while True:
            # In slices, so that Ctrl-C is seen.
            left = 0.2 if end is None else min(0.2, end - time.monotonic())
            left = max(left, 0.0)
            known = deferred.settle(left)
            if known and core.wait_until_idle(left) and _modules_are_idle(left):
                return True
            if end is not None and time.monotonic() >= end:
                return False
            line.update()


def _modules_are_idle(timeout: float) -> bool:
    loaded = sys.modules.get("eagercache.modules.manager")
    return loaded is None or bool(loaded.manager.wait(timeout))


def waits_for(done: int, seconds: float) -> str:
    """What is waited for in one line; ``done`` kernels were made in these seconds."""
    names = Counter(
        _short_name(description)
        for service in session.services()
        for description, _ in service.unanswered()
    )
    count = sum(names.values())
    shown = [f"{name} ({n})" if n > 1 else name for name, n in names.most_common(_MOST_NAMES)]
    if len(names) > _MOST_NAMES:
        shown.append(f"{len(names) - _MOST_NAMES} more")
    minutes, rest = divmod(int(seconds), 60)
    what = counted(count, "kernel") if count else "what was asked for"
    # The names come last: a narrow terminal cuts them off.
    text = f"eagercache: waiting for {what}, {done} done, {minutes}:{rest:02}"
    return f"{text}: {', '.join(shown)}" if shown else text


def _short_name(description: dict[str, Any]) -> str:
    name = described_name(description).removeprefix("aten::")
    return name or str(description.get("name") or "a module")


class _Line:
    """A line on the terminal; nothing where standard error is none."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _made()
        self._status: Any = None
        self._width = 0
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self) -> None:
        seconds = time.monotonic() - self._began
        if not self._shown or seconds < _QUIET_SECONDS:
            return
        if self._status is None:
            from rich.console import Console

            console = Console(stderr=True)
            self._width = console.width - _SPINNER_WIDTH
            self._status = console.status(self._text(seconds))
            self._status.start()
        else:
            self._status.update(self._text(seconds))

    def _text(self, seconds: float) -> str:
        from rich.markup import escape

        text = waits_for(_made() - self._before, seconds)
        return escape(text if len(text) <= self._width else f"{text[: self._width - 1]}…")


def _made() -> int:
    return sum(service.compiles + service.failures for service in session.services())
