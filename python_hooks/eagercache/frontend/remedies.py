"""What to do where kernels did not come to answer: one place for the words."""

from __future__ import annotations

from eagercache.calls.texts import counted


def remedy_of_short_programs(not_yet: int, program: str = "PROGRAM") -> str:
    """For a program that ended before its kernels were made; "" where none was under way."""
    if not_yet == 0:
        return ""
    was, them = ("was", "it") if not_yet == 1 else ("were", "them")
    return (
        f"{counted(not_yet, 'kernel')} {was} not made yet when the program ended; make {them} "
        f"beforehand: `eagercache record TRACE -- {program}`, then `eagercache warm TRACE`"
    )
