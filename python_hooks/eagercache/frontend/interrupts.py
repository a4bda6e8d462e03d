"""A program that an interrupt ended is ended by that signal, whatever runs at its exit.

The interpreter notes that a KeyboardInterrupt ended the main program, runs what is to run at exit,
and then dies by SIGINT, so that a shell stops its loop. Each `exec` or `eval` of a text, as a
dataclass that is first imported then has it, makes it forget the note: the exit status would be 1.
"""

from __future__ import annotations

import contextlib
import sys


def keep() -> None:
    """Makes the note again, as the last of what eagercache does at exit."""
    if _interrupted():
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _interrupted() -> bool:
    """Whether an interrupt that nobody handled ended the main program.

    `sys.last_type` alone does not say so: shells such as IPython set it for each of their lines.
    Their traceback begins inside of them, that of the program at the outermost frame.
    """
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return False
    if getattr(sys, "last_type", None) is not KeyboardInterrupt:
        return False
    outermost = getattr(sys, "last_traceback", None)
    return outermost is not None and outermost.tb_frame.f_back is None
