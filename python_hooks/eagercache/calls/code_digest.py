"""What Python code does, as a few digits: the same wherever in a file it stands."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from typing import Any

# The body of a class writes its own first line into the class, from Python 3.13 on.
_FIRST_LINE = "__firstlineno__"


@functools.lru_cache(maxsize=65536)
def code_digest(code: types.CodeType) -> str:
    """16 hexadecimal digits over what ``code`` does; line numbers and file names are left out."""
    digest = hashlib.sha256()
    steps, constants = _steps(code)
    digest.update(steps)
    for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        digest.update(repr(part).encode())
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    digest.update(repr(counts).encode())
    # Where a `try` begins and ends, which no instruction says since Python 3.11.
    digest.update(getattr(code, "co_exceptiontable", b""))
    for constant in constants:
        if isinstance(constant, types.CodeType):
            digest.update(code_digest(constant).encode())
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())
    return digest.hexdigest()[:16]


def _steps(code: types.CodeType) -> tuple[bytes, tuple[Any, ...]]:
    """The instructions and constants, without a class's first line."""
    if _FIRST_LINE not in code.co_names:
        return code.co_code, code.co_consts
    steps = list(dis.get_instructions(code))
    kept = [
        step
        for step, following in zip(steps, [*steps[1:], None], strict=True)
        if following is None or (following.opname, following.argval) != ("STORE_NAME", _FIRST_LINE)
    ]
    # A number below 256 may be in the instruction, so that others have other places: constants
    # stand in the order in which they are used.
    rows = [(s.opname, None if s.opcode in dis.hasconst else s.arg) for s in kept]
    return repr(rows).encode(), tuple(s.argval for s in kept if s.opcode in dis.hasconst)
