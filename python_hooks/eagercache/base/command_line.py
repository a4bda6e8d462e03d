"""Whether this process is the command `eagercache`, which imports torch only where it has to."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path


def is_command_line(argv: Sequence[str], words: Sequence[str]) -> bool:
    """Whether ``words`` started the command `eagercache`, of which ``argv`` are the arguments."""
    if argv and argv[0] == "-m":  # while the package is looked for
        option = next((i for i, word in enumerate(words) if re.fullmatch(r"-[A-Za-z]*m", word)), -1)
        return option > 0 and list(words[option + 1 : option + 2]) == ["eagercache"]
    return bool(argv) and Path(argv[0]).name == "eagercache"


# Asked as the package is imported: later, `python -m` has another ``sys.argv``.
IS_COMMAND_LINE = is_command_line(sys.argv, sys.orig_argv)
