"""What the import does beside a torch that nobody has tried: a release candidate, a new release.

A copy of this process looks at the hooks at once (`untried.quick_check`). Then a process beside
the program tries hooks, a kernel and a module against native (`self_check`). That takes Inductor,
and so half a minute; the program is native until it has passed (`untried.standing`). What comes of
it is kept in the store's folder for this very torch and this very extension module: it is paid for
once. A verdict is "" where all is well, else what is wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagercache.base import private_file, store_directory, torch_versions
from eagercache.base.config import WORKER_VARIABLE

# Set for the process that checks: it is to use what is being checked.
INSIDE_VARIABLE = "EAGERCACHE_INSIDE_SELF_CHECK"
NAME = "SELF_CHECK"
LOCK_NAME = f"{NAME}.lock"
# On two cores that had little else to do it took 28 and 36 s, nearly all of them the compiler's;
# with ten busy programs on each it took over three minutes. Few wait for it.
LIMIT_S = 600.0
_PROGRAM = "eagercache.base.self_check"
# As the command line of that name does, it imports no torch.
_WATCH = """
import sys
sys.argv[0] = "eagercache"
from eagercache.base.untried_torch import watch
watch(sys.argv[1])
"""
# A store that has none of the many builds of a developer's own torch has room for these.
_MOST_KEPT = 20


def remark(version: str) -> str:
    """The beginning of the one line that is said."""
    tried = ", ".join(row.torch for row in torch_versions.TRIED)
    return f"eagercache was tried with torch {tried}, and not with {version}"


def is_spared(environ: Mapping[str, str]) -> bool:
    """Whether this is a process that another one has started after the check, or for it."""
    return WORKER_VARIABLE in environ or INSIDE_VARIABLE in environ


def subject_of(torch_version: str, torch_git: str, build: str) -> str:
    """What a verdict is about: this torch, and this file of the extension module."""
    module = importlib.util.find_spec("eagercache._C")
    file = Path(module.origin).stat() if module is not None and module.origin else None
    written = f"{file.st_size} {file.st_mtime_ns}" if file is not None else ""
    return f"{torch_version} {torch_git} {build} {written}"


def folder_of(environ: Mapping[str, str]) -> Path | None:
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


def find(folder: Path | None, subject: str) -> str | None:
    """The verdict that is kept; None where there is none that may be believed."""
    known = _read(folder)
    return str(known[subject]) if subject in known else None


def keep(folder: Path | None, subject: str, problem: str) -> None:
    """Keeps a verdict, and the latest others."""
    if folder is None:
        return
    known = {key: value for key, value in _read(folder).items() if key != subject}
    kept = dict(list(known.items())[1 - _MOST_KEPT :])
    private_file.write(folder, NAME, {**kept, subject: problem})


def _read(folder: Path | None) -> dict[str, Any]:
    known = private_file.read(folder, NAME) if folder is not None else None
    return known if isinstance(known, dict) else {}


def watching(subject: str) -> list[str]:
    """The command that checks, keeps the verdict and prints it. It outlives who starts it."""
    package = Path(__file__).absolute().parent.parent.parent
    begin = f"import sys; sys.path.insert(0, {str(package)!r})"
    return [sys.executable, "-c", f"{begin}{_WATCH}", subject]


def watch(subject: str) -> None:
    """In a process of its own: checks, unless another one does and finds the verdict."""
    folder = folder_of(os.environ)
    with _alone(folder):
        problem, lasting = find(folder, subject), False
        if problem is None:
            problem, lasting = whole_check()
        if lasting:
            keep(folder, subject, problem)
    with contextlib.suppress(OSError):  # the program has ended
        print(json.dumps({"problem": problem}), flush=True)
    os._exit(0)


@contextlib.contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """One check at a time beside a store; where nothing can be kept each process has its own."""
    if folder is None or not private_file.is_private(folder):
        yield
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(folder / LOCK_NAME, flags, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def whole_check() -> tuple[str, bool]:
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
