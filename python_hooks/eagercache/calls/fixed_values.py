"""Values of the standard library, numpy and PyTorch that never change, as rows of JSON.

They are equal where their rows are, in every process. None of them leads to another object of the
program: a date whose zone is of the program's own has no row.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import sys
import uuid
from typing import Any

import torch

_WRITTEN_BY_REPR = (
    *(range, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(datetime.date, datetime.timedelta, datetime.timezone),
    torch.qscheme,
)
_WITH_A_ZONE = (datetime.datetime, datetime.time)
_PATHS = frozenset(
    {"PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath"}
)


def fixed_row(value: Any) -> list[Any] | None:
    """``value`` as a row; None where it is not of a class that is known to be fixed."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _WRITTEN_BY_REPR:
        return [name, repr(value)]
    if kind in _WITH_A_ZONE:
        zone = value.tzinfo
        known = zone is None or type(zone) is datetime.timezone
        return [name, repr(value)] if known else None
    if isinstance(value, pathlib.PurePath):
        of_library = kind.__module__.partition(".")[0] == "pathlib" and kind.__name__ in _PATHS
        return [name, str(value)] if of_library else None
    if kind is re.Pattern:
        return [name, repr(type(value.pattern)), repr(value.pattern), value.flags]
    return _row_of_numpy(value, name)


def _row_of_numpy(value: Any, name: str) -> list[Any] | None:
    """A dtype of numbers, which says all in its letters. Others have names, or what Python put."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.dtype):
        return None
    plain = value.kind in "biufc" and value.metadata is None and value.subdtype is None
    return [name, value.str] if plain else None
