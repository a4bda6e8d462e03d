"""What the import does beside a torch that nobody has tried: a release candidate, a new release.

Another process then tries the hooks, a kernel and a module against native (`self_check`), since
what does not fit may end the process that tries it. What comes of it is kept in the store's folder
for this very torch and this very extension module, so that it is paid for once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagercache.base import private_file, store_directory, torch_versions
from eagercache.base.config import WORKER_VARIABLE

# Set for the process that checks: it is to use what is being checked.
INSIDE_VARIABLE = "EAGERCACHE_INSIDE_SELF_CHECK"
NAME = "SELF_CHECK"
# On two cores that had little else to do it took 28 and 36 s, nearly all of them the compiler's.
LIMIT_S = 180.0
_PROGRAM = "eagercache.base.self_check"
# A store that has none of the many builds of a developer's own torch has room for these.
_MOST_KEPT = 20


def remark(version: str) -> str:
    """The beginning of the one line that is said."""
    tried = ", ".join(row.torch for row in torch_versions.TRIED)
    return f"eagercache was tried with torch {tried}, and not with {version}"


def is_spared(environ: Mapping[str, str]) -> bool:
    """Whether this is a process that another one has started after the check, or for it."""
    return WORKER_VARIABLE in environ or INSIDE_VARIABLE in environ


def problem(subject: str) -> str:
    """Why everything is to stay native beside the torch that ``subject`` names; "" for nothing.

    Takes seconds where it is not known, and remembers what it finds but for what may pass.
    """
    folder = _folder(os.environ)
    known = _read(folder)
    if subject in known:
        return str(known[subject])
    found, lasting = _check()
    if lasting and folder is not None:
        kept = dict(list(known.items())[1 - _MOST_KEPT :])
        private_file.write(folder, NAME, {**kept, subject: found})
    return found


def subject_of(torch_version: str, torch_git: str, build: str) -> str:
    """What a verdict is about: this torch, and this file of the extension module."""
    module = importlib.util.find_spec("eagercache._C")
    file = Path(module.origin).stat() if module is not None and module.origin else None
    written = f"{file.st_size} {file.st_mtime_ns}" if file is not None else ""
    return f"{torch_version} {torch_git} {build} {written}"


def _folder(environ: Mapping[str, str]) -> Path | None:
    """The store's folder, made where it is not there; None where there can be none."""
    if named := environ.get("EAGERCACHE_DIR"):
        folder = Path(named).absolute()
    else:
        folder = store_directory.candidates(environ, os.getuid())[0]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def _read(folder: Path | None) -> dict[str, Any]:
    known = private_file.read(folder, NAME) if folder is not None else None
    return known if isinstance(known, dict) else {}


def _check() -> tuple[str, bool]:
    """What is wrong, or ""; and whether it would be found again."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    package = Path(__file__).absolute().parent.parent.parent
    paths = [str(package), *filter(None, [kept.get("PYTHONPATH")])]
    cxx = {k: v for k, v in os.environ.items() if k == "EAGERCACHE_CXX"}
    ours = {INSIDE_VARIABLE: "1", "EAGERCACHE_LINGER": "0", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="eagercache-self-check-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", _PROGRAM, folder], cwd=folder, env={**kept, **cxx, **ours},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not end within {LIMIT_S:.0f} s, and is tried again", False
        except OSError as error:
            return f"it could not be started ({error})", False
    return _verdict(done)


def _verdict(done: subprocess.CompletedProcess[str]) -> tuple[str, bool]:
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            return str(said["problem"]), bool(said["lasting"])
    if done.returncode < 0:
        return f"it was ended by signal {-done.returncode}", True
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return last[:300], True
