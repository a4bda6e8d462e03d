"""Which failures are the machine's, and pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What compilers, the dynamic linker and torch say when the machine is in trouble. It passes, and is
# never stored as a failure for good.
_TROUBLE = (
    "Bus error signal",  # as g++ says what ended its parts
    "CPU time limit exceeded",
    "Cannot allocate memory",
    "Disk quota exceeded",
    "File size limit exceeded",
    "File too large",
    "Hangup signal",
    "Input/output error",
    "Interrupt signal",
    "Killed signal",
    "No space left",
    "Operation not permitted",
    "Permission denied",
    "Read-only file system",
    "Resource temporarily unavailable",
    "Stale file handle",
    "Terminated signal",
    "Text file busy",
    "Too many open files",
    "Transport endpoint is not connected",
    "can't allocate memory",
    "cannot execute",
    "error while loading shared libraries",
    "failed to map segment",  # by dlopen, of a mount that is noexec
    "out of memory",
    "std::bad_alloc",
    "virtual memory exhausted",
)
_STORE_CODES = frozenset({"busy", "corrupt", "denied", "full", "io_error", "not_found", "refused"})


def is_trouble_of_machine(text: str) -> bool:
    """Whether what a program said names a reason of the machine's."""
    return any(sign in text for sign in _TROUBLE)


def causes(error: BaseException, *, handled: bool = False) -> Iterator[BaseException]:
    """``error`` and what it was raised from, through the exceptions that Inductor wraps.

    With ``handled`` also those while whose handling they were raised.
    """
    seen: set[int] = set()
    chain: list[Any] = [error]
    while chain:
        current = chain.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        chain += [current.__cause__, getattr(current, "inner_exception", None)]
        if handled:
            chain.append(current.__context__)


def is_passing(error: BaseException) -> bool:
    """Whether the machine may be the reason of a failure: memory, files, the store, an import."""
    return any(_is_passing(one) for one in causes(error))


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, (OSError, MemoryError, ImportError)):
        return True
    if type(error).__name__ == "StoreError" and getattr(error, "code", "") in _STORE_CODES:
        return True
    return bool(getattr(error, "transient", False)) or is_trouble_of_machine(str(error))
