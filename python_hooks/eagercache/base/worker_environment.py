"""What a compile worker may import, and whom its folders may belong to.

A worker imports nothing from the folder that the program happens to be in: in one that others may
write, whoever does would run code as this user. What the program itself imports from is handed on
where nobody else can have written there, so that the classes of a module are found.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eagercache.base.private_file import is_kept

# Where a worker starts: it belongs to root, and Python 3.10 knows no other way to keep the current
# folder out of `sys.path`.
START_FOLDER = "/"

# Folders for the end of a worker's `sys.path`, which PYTHONPATH cannot name.
LATE_PATHS_VARIABLE = "EAGERCACHE_INSIDE_WORKER_PATHS"

_INSTALLED = ("site-packages", "dist-packages")


def absolute_entries(text: str) -> list[str]:
    """The folders that a variable such as PATH names. Empty ones, the current folder, are not."""
    return [os.path.abspath(entry) for entry in text.split(os.pathsep) if entry]  # noqa: PTH100


def import_paths(
    package: Path, environ: Mapping[str, str], path: Sequence[str] | None = None
) -> dict[str, str]:
    """The variables that say what a worker's `sys.path` is; ``package`` comes first.

    ``path`` is this process's, of which the folders before and after the standard library stay
    before and after it. What the user names in PYTHONPATH is the user's own choice.
    """
    early, late = _own_folders(sys.path if path is None else path)
    named = absolute_entries(environ.get("PYTHONPATH", ""))
    trusted = [entry for entry in early if entry in named or is_trusted(Path(entry))]
    variables = {
        "PYTHONPATH": _joined([str(package), *(e for e in trusted if e not in named), *named]),
        # Python 3.11 and later; for 3.10 see START_FOLDER.
        "PYTHONSAFEPATH": "1",
    }
    if kept := [entry for entry in late if is_trusted(Path(entry))]:
        variables[LATE_PATHS_VARIABLE] = _joined(kept)
    return variables


def add_late_paths(environ: Mapping[str, str]) -> None:
    """In a worker: what the program has behind the standard library."""
    entries = absolute_entries(environ.get(LATE_PATHS_VARIABLE, ""))
    sys.path.extend(entry for entry in entries if entry not in sys.path)


def trusted_paths() -> list[str]:
    """What of `sys.path` workers may import a module's classes from, where they find none sooner.

    The current folder is never there by that name.
    """
    named = absolute_entries(os.environ.get("PYTHONPATH", ""))
    entries = [os.path.abspath(entry) for entry in sys.path if entry]  # noqa: PTH100
    return [entry for entry in entries if entry in named or is_trusted(Path(entry))]


def _own_folders(path: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folders of a `sys.path` that are not Python's own, before and after those that are."""
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    early: list[str] = []
    late: list[str] = []
    found = early
    for entry in path:
        if entry in library or entry.endswith((".zip", "lib-dynload")):
            found = late
        elif Path(entry).name not in _INSTALLED:
            try:
                found.append(os.path.abspath(entry))  # noqa: PTH100 - "" is the current folder
            except OSError:
                continue  # the current folder is gone
    return early, late


def _joined(entries: Iterable[str]) -> str:
    # One with the separator in its name cannot be said.
    return os.pathsep.join(dict.fromkeys(e for e in entries if os.pathsep not in e))


def is_trusted(folder: Path) -> bool:
    """Whether nobody but this user and root can have put there what is in ``folder``.

    Links in its name are followed, as an import does. A group that is the user's alone is the user.
    """
    real = Path(os.path.realpath(folder))
    try:
        own = real.stat()
        above = [path.stat() for path in real.parents]
    except OSError:
        return False
    return is_kept(own, above, _is_ours)


def _is_ours(status: os.stat_result) -> bool:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        return False
    return not status.st_mode & stat.S_IWGRP or _is_users_own_group(status.st_gid)


def _is_users_own_group(gid: int) -> bool:
    """Whether a group is what many systems make for each user, where folders are 0775."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and not group.gr_mem
