"""Recording which calls this process makes: `eagercache.record`."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from eagercache.base import config, log
from eagercache.base.load import core
from eagercache.calls import trace
from eagercache.frontend import api
from eagercache.runtime import choices
from eagercache.runtime.left_native import left_native
from eagercache.runtime.session import session

# What is recorded is written after so many seconds, then after twice as many, and so on: a process
# that is killed loses half of its trace at most, and a long one writes little.
FIRST_WRITE_SECONDS = 2.0

_lock = threading.Lock()  # guards what follows
_listeners = 0
_open: set[Path] = set()


def listen() -> None:
    """Has calls counted by key, until as many `unlisten` as `listen` were called."""
    global _listeners
    assert core is not None
    left_native.watch()
    with _lock:
        _listeners += 1
        core.set_recording(True)


def unlisten() -> None:
    """Ends one `listen`."""
    global _listeners
    assert core is not None
    with _lock:
        _listeners -= 1
        core.set_recording(_listeners > 0)
    left_native.unwatch()


class Recording:
    """A trace being written: ends with `stop()`, with the block, or with the process.

    Attributes:
        path: the file.
        calls, keys: what was written so far.
    """

    def __init__(self, path: Path, enabled: api.Enabled | None) -> None:
        self.path = path
        self.calls = 0
        self.keys = 0
        # By us, for as long as calls are recorded or until the program enables something itself.
        self._enabled = enabled
        self._enables = session.enables
        self._owner = os.getpid()
        self._active = False
        self._written: dict[str, int] = {}
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        if core is None:
            return
        self._active = True
        self._written = {_key(row): row["calls"] for row in _rows()}
        self._lost = core.lost_calls()
        listen()
        atexit.register(self.stop)
        self._thread = threading.Thread(
            target=self._write_now_and_then, name="eagercache-record", daemon=True
        )
        self._thread.start()

    def flush(self) -> None:
        """Appends what was recorded since the last time. Raises OSError when it cannot."""
        if core is None or not self._active or os.getpid() != self._owner:
            return
        with self._writing:
            lines = []
            for row in _rows():
                key = _key(row)
                calls = row["calls"] - self._written.get(key, 0)
                if calls <= 0:
                    continue
                if self._written.get(key, 0) == 0:
                    self.keys += 1
                self._written[key] = row["calls"]
                self.calls += calls
                lines.append(json.dumps({**row, "calls": calls}, separators=(",", ":")))
            lost = core.lost_calls() - self._lost
            if lines or lost:
                trace.append_section(self.path, lines, lost=lost)
                self._lost += lost

    def stop(self) -> None:
        """Writes the rest and ends; what `record()` enabled is put back. Again: does nothing."""
        if not self._active or os.getpid() != self._owner:
            return
        with _lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            _open.discard(self.path)
        unlisten()
        try:
            self.flush()
        except OSError as error:
            log.LOGGER.warning("the trace %s cannot be written: %s", self.path, error)
        finally:
            atexit.unregister(self.stop)
            if self._enabled is not None and session.enables == self._enables:
                self._enabled.__exit__(None, None, None)
            if threading.current_thread() is not self._thread:
                self._thread.join(5.0)

    def _write_now_and_then(self) -> None:
        delay = FIRST_WRITE_SECONDS
        while not self._stopped.wait(delay):
            try:
                self.flush()
            except OSError as error:
                log.event(logging.INFO, "trace", path=self.path, problem=error)
            delay *= 2

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<eagercache.Recording {self.path}>"


def _rows() -> list[dict[str, Any]]:
    assert core is not None
    return [json.loads(text) for text, _ in core.recorded_calls()]


def _key(row: dict[str, Any]) -> str:
    # The digest leaves out what tells GPUs of one kind apart; two of them make one line.
    return f"{row['digest']}/{json.dumps(row['args'])}"


def record(path: str | os.PathLike[str]) -> Recording:
    """Writes every eligible call of this process to a trace, from now on.

    Each key of a hooked operator gets one line with the number of its calls (`trace.py` has the
    format). Processes, ranks and runs may write to the same file; `eagercache warm` adds their
    calls up. When nothing is enabled, the default operators are, with ``on_miss="native"``, until
    the recording ends: nothing is compiled.

    Returns:
        A context manager, which may be ignored: then the recording ends with the process.

    Raises:
        ValueError: the file is no trace, or this process records to it already.
        OSError: the file cannot be written.
    """
    target = Path(path).absolute()
    if core is None or choices.is_inert(config.read_settings()):
        inert = Recording.__new__(Recording)
        inert.path, inert.calls, inert.keys, inert._active = target, 0, 0, False
        return inert
    if target.exists() and not trace.is_trace(target):
        raise ValueError(f"{target} exists and is no trace; name another file")
    with target.open("ab"):
        pass  # the error belongs here, not to the end of the program
    with _lock:
        if target in _open:
            raise ValueError(f"this process records to {target} already")
        _open.add(target)
    enabled = None if api.is_enabled() else api.enable(on_miss="native")
    return Recording(target, enabled)
