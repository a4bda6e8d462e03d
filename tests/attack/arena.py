"""Where scenes run programs: stores, processes, and what is left of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import clean_environment
from launcher import Launcher
from prepared_worker import Preparer, with_workers

_PR_SET_CHILD_SUBREAPER = 36
MARK = "ATTACK "
# Seconds after which a program hangs: one that compiles on a busy machine needs minutes.
PATIENCE = 900.0

# What programs do: calls with known answers, asked before there are kernels. argv: the way of a
# miss, then how often.
VICTIM = """
import json, sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(64, 96)
calls = [lambda: torch.var(x, -1), lambda: torch.softmax(x, -1)]
expected = [call() for call in calls]
import eagercache
eagercache.enable(["var.correction", "_softmax"], on_miss=sys.argv[1], choose="always")
print("ATTACK " + json.dumps({"begun": True}), flush=True)
right = True
for _ in range(int(sys.argv[2])):
    for call, native in zip(calls, expected):
        right = right and torch.allclose(call(), native, rtol=1e-5, atol=1e-6)
print("ATTACK " + json.dumps({"right": right, "hits": eagercache.stats().hits}), flush=True)
"""


@dataclass
class Row:
    """What came of one scene. A number but ``tried`` that is not 0 is a finding."""

    name: str
    tried: int = 0
    hangs: int = 0
    foreign: int = 0  # code of somebody else ran
    wrong: int = 0
    permanent: int = 0  # failures that are stored for good
    leftovers: int = 0  # processes and files
    died: int = 0  # by a signal or a traceback of ours
    note: str = ""
    programs: int = 0  # of those tried, whole programs
    used: int = 0  # of those, with answers of kernels
    known: bool = False  # the findings are in SECURITY.md among what is not protected

    def findings(self) -> int:
        """How much went wrong."""
        return self.hangs + self.foreign + self.wrong + self.permanent + self.leftovers + self.died

    def count(self, ran: Ran) -> None:
        """Adds one program that nothing should have ended."""
        self.tried += 1
        self.programs += 1
        self.used += bool(ran.report.get("hits"))
        self.hangs += ran.hung
        self.wrong += ran.report.get("right") is False
        bad = not ran.hung and (ran.code != 0 or "right" not in ran.report)
        self.died += bad
        if (bad or ran.hung) and not self.note:
            self.note = ran.in_words()


@dataclass
class Ran:
    """How a program ended: ``code`` as of `subprocess`."""

    code: int
    stderr: str
    report: dict[str, Any] = field(default_factory=dict)
    hung: bool = False

    def in_words(self) -> str:
        """How it ended, and the last thing that it said."""
        lines = [line for line in self.stderr.splitlines() if line.strip()] or [""]
        return f"{'hung' if self.hung else f'exit {self.code}'}: {lines[-1][:90]}"


def read_report(stdout: str) -> dict[str, Any]:
    """What a program printed behind the mark, later lines on top."""
    report: dict[str, Any] = {}
    for line in stdout.splitlines():
        if line.startswith(MARK):
            report.update(json.loads(line[len(MARK) :]))
    return report


def children(pid: int) -> list[int]:
    """All processes below one, zombies left out."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents.setdefault(int(parent), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        below = parents.get(left.pop(), [])
        found += below
        left += below
    return found


class Arena:
    """A folder for stores, and processes that fork programs and workers quickly."""

    def __init__(self, folder: Path, seed: int, *, quick: bool) -> None:
        self.folder = folder
        self.quick = quick
        self.random = random.Random(seed)
        self._count = 0
        # What our programs leave behind is ours, so that it is seen.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @functools.cached_property
    def launcher(self) -> Launcher:
        """Forks programs from a process that has imported torch."""
        return Launcher(clean_environment())

    @functools.cached_property
    def preparer(self) -> Preparer:
        """Forks workers from a process that has imported Inductor."""
        return Preparer(clean_environment())

    @functools.cached_property
    def warm(self) -> Path:
        """A store with the kernels of VICTIM; scenes take copies."""
        store = self.new_store()
        ran = self.fork(VICTIM, store, "wait", "2", workers=True)
        if not ran.report.get("right") or not list(store.rglob("*.so")):
            print(ran.stderr, file=sys.stderr)
            raise RuntimeError(f"the store cannot be filled, {ran.in_words()}")
        return store

    def close(self) -> None:
        """Ends what was started."""
        if "launcher" in vars(self):
            self.launcher.close()
        if "preparer" in vars(self):
            self.preparer.close()

    def new_folder(self) -> Path:
        """An empty private folder."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir(mode=0o700)
        return folder

    def new_store(self) -> Path:
        """A private empty store."""
        return self.new_folder()

    def warm_copy(self) -> Path:
        """A store with kernels that may be spoilt."""
        target = self.new_folder() / "store"
        shutil.copytree(self.warm, target, symlinks=True)
        target.chmod(0o700)
        return target

    def environment(self, store: Path, **variables: str) -> dict[str, str]:
        """A program's, on that store."""
        return clean_environment(EAGERCACHE_DIR=str(store), **variables)

    def fork(
        self,
        code: str,
        store: Path,
        *arguments: str,
        timeout: float = PATIENCE,
        workers: bool = False,
        folder: Path | None = None,
        launcher: Launcher | None = None,
        **variables: str,
    ) -> Ran:
        """Runs a program that is forked, and with ``workers`` forks its workers too.

        Its folder is the store, and the process that forks is the arena's, unless others are given.
        """
        environment = self.environment(store, **variables)
        address = self.preparer.address if workers else ""
        try:
            done = (launcher or self.launcher).run(
                code, arguments, environment, folder or store, timeout, address
            )
        except subprocess.TimeoutExpired as error:
            return Ran(-9, str(error.stderr or ""), hung=True)
        return Ran(done.returncode, done.stderr, read_report(done.stdout))

    def start(
        self,
        code: str,
        store: Path,
        *arguments: str,
        prefix: Sequence[str] = (),
        folder: Path | None = None,
        prepared: bool = False,
        **variables: str,
    ) -> Started:
        """Starts a program by exec; with ``prepared`` its workers are forked."""
        environment = self.environment(store, **variables)
        if prepared:
            environment = with_workers(self.preparer.address, environment)
        words = [*prefix, sys.executable, "-c", code, *arguments]
        return Started(words, environment, folder or store)

    def start_script(self, script: Path, store: Path, *arguments: str) -> Started:
        """Starts a program that is a file, as `multiprocessing` needs it to spawn."""
        words = [sys.executable, str(script), *arguments]
        return Started(words, self.environment(store), store)

    def forget_processes(self, known: set[int], seconds: float = 6.0) -> int:
        """How many processes are left that were not ``known``, after a while; they are ended."""
        end = time.monotonic() + seconds
        while (left := set(self.processes()) - known) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    def processes(self) -> list[int]:
        """Ours, but for the two that fork."""
        while True:
            with contextlib.suppress(ChildProcessError):
                # Orphans alone: a child of ours is waited for by who started it.
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return children(os.getpid())

    @contextlib.contextmanager
    def watching(self, row: Row) -> Iterator[None]:
        """Counts the processes that the block leaves behind."""
        _ = self.launcher, self.preparer
        before = set(self.processes())
        yield
        row.leftovers += self.forget_processes(before)


class Started:
    """A running program."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(
            words,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def worker(self, seconds: float) -> int | None:
        """Its first compile worker, by exec, as soon as there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            for pid in children(self.process.pid):
                with contextlib.suppress(OSError):
                    if b"eagercache.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return pid
            time.sleep(0.02)
        return None

    def finish(self, timeout: float = PATIENCE) -> Ran:
        """Its end; a program that is late is killed."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            return Ran(-9, err, read_report(out), hung=True)
        return Ran(self.process.returncode, err, read_report(out))


def can_run(prefix: Sequence[str]) -> bool:
    """Whether this user may run programs behind ``prefix`` (unshare, mount, ...)."""
    return not subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode


def preloaded(source: Path) -> dict[str, str]:
    """Variables for programs with a library of the C file ``source``; empty where gcc fails."""
    library = source.with_suffix(".so")
    command = ["gcc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"]
    if shutil.which("gcc") is None or subprocess.run(command, check=False).returncode != 0:
        return {}
    return {"LD_PRELOAD": str(library)}


def permanent_failures(store: Path) -> int:
    """Failures in a store that are for good."""
    return sum(b"failure deterministic" in path.read_bytes() for path in store.glob("v1/*/n/*"))


# In an hour that is over: what dead processes left is swept up.
SWEEP = """
import json, os, sys
from pathlib import Path
import torch, eagercache
from eagercache import _C
from eagercache.base import environment
root = Path(os.environ["EAGERCACHE_DIR"])
for path in root.glob("v1/t/*"):
    os.utime(path, (1, 1), follow_symlinks=False)
_C.Store(str(root), environment.environment_text()).evict()
left = [path.name for path in root.glob("v1/t/*")]
print("ATTACK " + json.dumps({"right": True, "left": left}))
"""


def files_left(arena: Arena, store: Path) -> int:
    """Temporary files of a store that stay although nobody has touched them for hours."""
    if not (store / "v1/t").is_dir():
        return 0
    return len(arena.fork(SWEEP, store).report.get("left", ["the sweep failed"]))
