"""Which calls a warm-up compiles: those of traces and operator logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagercache.ahead.errors import WarmError
from eagercache.base import operators
from eagercache.calls import operator_log, trace
from eagercache.calls.log_descriptions import Reading
from eagercache.runtime import choices


def read_traces(paths: Sequence[Path], reading: Reading) -> tuple[trace.Trace, set[str]]:
    """The calls of all files (of all in a folder), and the identities of those out of logs."""
    merged = trace.Trace()
    out_of_logs: set[str] = set()
    for path in paths:
        if not path.exists():
            raise WarmError(f"there is no trace {path}; make one with `eagercache record`")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        read = [_read_file(file, path.is_dir(), reading, merged, out_of_logs) for file in files]
        if not any(read):
            raise WarmError(f"there is no trace in {path}; make one with `eagercache record`")
    return merged, out_of_logs


def _read_file(
    file: Path,
    in_folder: bool,
    reading: Reading,
    merged: trace.Trace,
    out_of_logs: set[str],
) -> bool:
    """Whether the file, which may be anything where it is in a folder, is a trace."""
    try:
        if not trace.is_trace(file):
            if in_folder:
                return False  # a licence, a page of notes
            raise WarmError(  # noqa: TRY301 - it passes the handlers
                f"{file} is neither a trace of `eagercache record` nor an operator log"
            )
        with file.open("rb") as opened:
            is_log = opened.read(len(trace.LOG_MARK)).decode(errors="replace") == trace.LOG_MARK
        if is_log:
            before = set(merged.calls)
            operator_log.read(file, reading, merged)
            out_of_logs |= set(merged.calls) - before
        else:
            trace.read(file, merged)
    except OSError as error:
        raise WarmError(f"the trace {file} cannot be read: {error.strerror}") from error
    except WarmError:
        raise
    except trace.TraceError as error:
        raise WarmError(str(error)) from error
    except MALFORMED as error:
        raise WarmError(f"{file} is damaged ({one_line(error)}); record the trace anew") from error
    return True


def wanted_calls(
    merged: trace.Trace,
    out_of_logs: set[str],
    keys: Sequence[str],
    ops: Any,
    skipped: set[operators.OperatorName],
) -> list[trace.TracedCall]:
    """The calls to compile: of a log only operators that `enable()` hooks, unless named."""
    named = {
        (key, name) for name, key in choices.selected(ops, skipped, list(keys))
    }  # the default operators where none are named
    calls = []
    for identity, call in merged.calls.items():
        name = (call.description["op"], call.description["overload"])
        key = call.description["dispatch_key"]
        if key not in keys or name in skipped:
            continue
        if (key, name) in named or (ops is None and identity not in out_of_logs):
            calls.append(call)
    return calls


# What code raises that reads a description of another form than ours.
MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)


def one_line(error: BaseException) -> str:
    """For a message; its text is cut off."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
