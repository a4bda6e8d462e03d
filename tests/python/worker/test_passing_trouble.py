"""What passes (a full disk, no memory) is told from what will be the same next time."""

from __future__ import annotations

import errno

import pytest
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import is_transient

pytestmark = pytest.mark.once


class StoreError(RuntimeError):
    """Like the core's."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class InductorError(RuntimeError):
    """Like Inductor's, which names what it wraps in an attribute of its own."""

    def __init__(self, inner: Exception) -> None:
        super().__init__("while lowering")
        self.inner_exception = inner


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("outer")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (wrapped(OSError(errno.EDQUOT, "Disk quota exceeded")), True),
        (InductorError(PermissionError(errno.EACCES, "Permission denied")), True),
        (MemoryError(), True),
        (wrapped(ImportError("libtorch_cpu.so: cannot open shared object file")), True),
        (StoreError("the store has no room", "full"), True),
        (StoreError("the entry is the caller's mistake", "invalid_argument"), False),
        (RuntimeError("kernel.so: failed to map segment from shared object"), True),
        (
            RuntimeError("g++: error: File size limit exceeded signal terminated program cc1plus"),
            True,
        ),
        (RuntimeError("g++: fatal error: Terminated signal terminated program as"), True),
        (RuntimeError("g++: error: Segmentation fault signal terminated program cc1plus"), False),
        (RuntimeError("no such operator"), False),
        (InductorError(ValueError("not supported")), False),
    ],
)
def test_trouble_of_the_machine_is_told_from_what_is_wrong_with_a_call(
    error: Exception, passing: bool
) -> None:
    assert is_transient(error) == passing


@pytest.mark.parametrize(
    ("cause", "verdict"),
    [
        (MemoryError(), "failed"),
        (OSError(errno.EMFILE, "Too many open files"), "failed"),
        (OSError(errno.ENOENT, "a file of the program's own"), "native"),
        (ValueError("data-dependent control flow"), "native"),
    ],
)
def test_a_refusal_that_trouble_of_the_machine_led_to_is_not_for_good(
    cause: Exception, verdict: str
) -> None:
    def step() -> None:
        raise CompileRefused("it cannot be traced") from cause

    refused = Job({"description": {}}, None)
    refused._guarded(step)
    assert refused.outcome is not None
    assert (refused.outcome.verdict, refused.outcome.transient) == (verdict, verdict == "failed")
