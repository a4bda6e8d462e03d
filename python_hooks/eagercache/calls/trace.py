"""Traces: which calls programs made, and how often.

A trace is a text file of JSON lines. Every process that records appends one or more sections, each
in one go and under a lock: a header, then one line per key.

    {"eagercache_trace": 1, "lines": 2, "torch": "2.11.0", "pid": 71, "rank": "0", "lost": 0}
    {"op": "aten::var", "overload": "correction", "dispatch_key": "CPU", "state": {…}, "args": […],
     "digest": "9f…", "calls": 12, "native_ns": 5300}

(each of them on one line). A call's line holds what a compile is asked with: `state` and `args` are
those of `describe_call` in guards/key/call_key.h, `calls` how often the section's process made the
call since its last section, `native_ns` the mean time of the calls that native answered, left out
where none was timed, and `digest` the key's name in a store of the process that recorded it. Lines
with the same call add up, over sections and files. Unknown fields are ignored; the version changes
when a field's meaning does.

`operator_log` reads a second format.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagercache.base.operators import described_name

VERSION = 1
MARK = "eagercache_trace"
# What a file of operator logs begins with.
LOG_MARK = "Operator: "

# What is larger is not read.
MAX_FILE_BYTES = 1 << 30
_MAX_COUNT = 1 << 62

_CALL_FIELDS = ("op", "overload", "dispatch_key", "state", "args")


class TraceError(ValueError):
    """A file that is no trace, or a damaged one: one line that says where and what to do."""


@dataclass
class TracedCall:
    """One key and how often it was met. ``description`` has the fields of a call's line."""

    description: dict[str, Any]
    calls: int
    native_ns: float | None = None

    @property
    def name(self) -> str:
        """The operator with its overload."""
        return described_name(self.description)


@dataclass
class Trace:
    """What some files hold, the same calls added up.

    Attributes:
        calls: by identity, in the order in which they were met.
        sections: how many there were; at least one of each process that recorded.
        lost: calls that were not recorded because there were too many different ones.
        problems: what was left out of the files, a line each.
    """

    calls: dict[str, TracedCall] = field(default_factory=dict)
    sections: int = 0
    lost: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, call: TracedCall) -> None:
        """Adds a call, or adds to it."""
        known = self.calls.setdefault(identity(call.description), call)
        if known is call:
            return
        if call.native_ns is not None:
            weight = known.calls if known.native_ns is not None else 0
            total = (known.native_ns or 0.0) * weight + call.native_ns * call.calls
            known.native_ns = total / (weight + call.calls)
        known.calls += call.calls


def identity(description: Mapping[str, Any]) -> str:
    """Equal for equal calls, whatever store, process or file they come from."""
    args = [_without_names(arg) for arg in description["args"]]
    parts = [description[name] for name in _CALL_FIELDS[:-1]]
    return json.dumps([*parts, args], sort_keys=True, separators=(",", ":"))


def _without_names(argument: Mapping[str, Any]) -> dict[str, Any]:
    """What tells arguments apart: of torch's constants the name, not the number beside it."""
    spare = _SPARE if argument.get("kind") in _CONSTANTS else ("name",)
    return {name: value for name, value in argument.items() if name not in spare}


_CONSTANTS = ("scalar_type", "layout", "memory_format", "device")
_SPARE = ("name", "value", "type", "index")


def append_section(path: Path, lines: Iterable[str], *, lost: int = 0) -> None:
    """Appends a section as one whole, waiting for others that do; OSError when that fails."""
    body = list(lines)
    header = {
        MARK: VERSION,
        "lines": len(body),
        "torch": str(torch.__version__),
        "pid": os.getpid(),
        "rank": os.environ.get("RANK"),
        "time": int(time.time()),
        "lost": lost,
    }
    text = "".join(f"{line}\n" for line in [json.dumps(header, separators=(",", ":")), *body])
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = os.fstat(file.fileno()).st_size
        try:
            file.write(text.encode())
            file.flush()
        except OSError:
            # A full disk leaves whole sections only.
            os.truncate(path, before)
            raise


def is_trace(path: Path) -> bool:
    """Whether a file is empty or begins like a trace of either format.

    Nothing but a file is: from a pipe what is read now could not be read again, and it may wait.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(len(LOG_MARK) + len(MARK) + 8).lstrip()
    return not head or head.startswith((LOG_MARK.encode(), f'{{"{MARK}"'.encode()))


def read(path: Path, trace: Trace) -> None:
    """Adds a file of this format to a trace. Raises TraceError; OSError when it cannot be read."""
    expected = 0
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise TraceError(f"{path}: is no trace: it has {size} bytes; record the trace anew")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is no trace: it is not text") from error
    for number, row in _rows(path, lines, trace):
        if MARK in row:
            expected = _read_header(path, number, row, trace)
        elif trace.sections == 0 and expected == 0:
            raise TraceError(f"{path}:{number}: is no trace: its first line has no {MARK!r}")
        else:
            trace.add(_call_of(path, number, row))


def _rows(path: Path, lines: list[str], trace: Trace) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines' objects. A line that a killed process left unfinished is said and left out."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise TraceError(
                f"{path}:{number}: is nested too deeply; record the trace anew"
            ) from error
        except ValueError as error:
            torn = number == len(lines) or lines[number].startswith(f'{{"{MARK}"')
            if not torn or number == 1:
                raise TraceError(
                    f"{path}:{number}: is no JSON ({error}); record the trace anew"
                ) from error
            trace.problems.append(f"{path}:{number}: an unfinished line was left out")
            continue
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: is no JSON object; record the trace anew")
        yield number, row


def _read_header(path: Path, number: int, row: Mapping[str, Any], trace: Trace) -> int:
    if row[MARK] != VERSION:
        raise TraceError(
            f"{path}:{number}: is of version {str(row[MARK])[:40]} and this eagercache reads "
            f"{VERSION}; record the trace anew with this version"
        )
    try:
        lost, lines = _count(row.get("lost", 0)), _count(row.get("lines", 0))
    except ValueError as error:
        raise TraceError(
            f"{path}:{number}: is no header of a trace ({error}); record the trace anew"
        ) from error
    trace.sections += 1
    trace.lost += lost
    return lines


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _call_of(path: Path, number: int, row: Mapping[str, Any]) -> TracedCall:
    try:
        description = {name: row[name] for name in _CALL_FIELDS}
        calls = _count(row["calls"])
        native_ns = float(row["native_ns"]) if "native_ns" in row else None
        well_formed = calls > 0 and isinstance(row["state"], dict)
        well_formed = well_formed and all(isinstance(row[name], str) for name in _CALL_FIELDS[:3])
        well_formed = well_formed and isinstance(row["args"], list)
        well_formed = well_formed and all(isinstance(arg, dict) for arg in row["args"])
        well_formed = well_formed and (native_ns is None or 0 <= native_ns < math.inf)
        if well_formed:
            identity(description)  # which goes as deep as the JSON does
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(
            f"{path}:{number}: is no call of a trace ({error!r}); record the trace anew"
        ) from error
    if not well_formed:
        raise TraceError(f"{path}:{number}: is no call of a trace; record the trace anew")
    return TracedCall(description, calls, native_ns)
