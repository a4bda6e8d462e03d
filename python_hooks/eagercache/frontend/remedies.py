"""What to do where kernels did not come to answer: one place for the words."""

from __future__ import annotations

from eagercache.calls.texts import counted


def remedy_of_short_programs(
    not_yet: int, program: str = "PROGRAM", *, running: bool = False
) -> str:
    """For a program that ended before its kernels were made, or may; "" where none is under way."""
    if not_yet == 0:
        return ""
    one = not_yet == 1
    them = "it" if one else "them"
    if running:
        are = "is" if one else "are"
        said = f"{are} not made yet; where the program ends before that, make {them}"
    else:
        said = f"{'was' if one else 'were'} not made yet when the program ended; make {them}"
    return (
        f"{counted(not_yet, 'kernel')} {said} beforehand: `eagercache record TRACE -- {program}`, "
        "then `eagercache warm TRACE`"
    )
