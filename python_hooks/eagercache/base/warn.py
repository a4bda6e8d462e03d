"""Warnings of ours: each once in a process."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

_warned: set[str] = set()


def warn_once(key: str, message: str, about: CodeType | None = None) -> None:
    """Warns once per process for each ``key``; at the place of that code, where there is one.

    Any thread may call it. Otherwise it is the caller's caller's caller: the user's program.
    """
    if key in _warned:
        return
    _warned.add(key)
    text = f"eagercache: {message}"
    if about is None:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    else:
        place = about.co_filename, about.co_firstlineno
        warnings.warn_explicit(text, RuntimeWarning, *place)
