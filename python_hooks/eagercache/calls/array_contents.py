"""What an array of numpy holds: by it two are told apart, and nobody holds the array.

A program may resize an array that nothing else refers to, and write into it at any time: there is
no version that would say so. So its bytes are compared, which is for small arrays.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

MAX_BYTES = 64 << 10
# Booleans, integers and floats. Kinds that Python's buffers have no format for are not taken.
_KINDS = frozenset("?bBhHiIlLqQefd")

# (type, format, shape, strides, bytes): see nn_modules/places/array_contents.h.
Contents = tuple[type, str, tuple[int, ...], tuple[int, ...], bytes]


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy, of no class of its own."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def contents_of(value: Any) -> Contents | None:
    """What an array holds now; None of one that is not compared by that, or of anything else."""
    if not is_array(value) or value.nbytes > MAX_BYTES or value.dtype.metadata is not None:
        return None
    if not value.flags.writeable or not value.flags.aligned:
        return None
    if not value.flags.c_contiguous or not value.dtype.isnative or value.dtype.char not in _KINDS:
        return None
    view = memoryview(value)
    assert view.shape is not None and view.strides is not None
    return type(value), view.format, tuple(view.shape), tuple(view.strides), view.tobytes()


def contents_row(value: Any) -> list[Any] | None:
    """The same as canonical JSON."""
    found = contents_of(value)
    if found is None:
        return None
    _, letter, shape, strides, held = found
    return ["array", letter, list(shape), list(strides), hashlib.sha256(held).hexdigest()]
