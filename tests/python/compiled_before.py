"""What the compiler made of the same text once, for the workers of tests.

Tests fill stores of their own, and some with the same kernels: those of another machine's store, or
of the same module in another program. What a compile made is kept in the folder that these workers
share, under a digest of all that it is made from, and copied to where the same is asked for again.
It is linked, loaded, proved and timed each time.

Only compiles by the compiler that is found when nobody names one are kept: another one is what a
test is about.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from eagercache.worker.inductor import bare, commands, container

# Precompiled headers and common objects are shared as they are; weights are in files beside them.
_STEPS = ("kernel", "wrapper")
COMPILED = "compiled"


def use(folder: Path, compiler: str) -> None:
    """From here on what ``compiler`` compiles in this process is kept below ``folder``.

    That is where somebody has made the folder COMPILED for it; elsewhere nothing is kept.
    """
    objects = folder / COMPILED
    if not objects.is_dir():
        return

    class Command(commands.Command):
        """One that has its target at once, where it is known."""

        def __init__(self, step: str, words: Sequence[str], directory: Path) -> None:
            self._kept: Path | None = None
            if step in _STEPS and "-c" in words and words[0] == compiler:
                self._kept = objects / _digest(words, directory)
                self._target = directory / words[list(words).index("-o") + 1]
            self.was_there = self._take()
            if not self.was_there:
                super().__init__(step, words, directory)
            self.step = step

        def _take(self) -> bool:
            if self._kept is None or not self._kept.exists():
                return False
            try:
                shutil.copyfile(self._kept / "object", self._target)
            except OSError:
                return False  # what is wrong with the target is for the compiler to say
            self.seconds = float(json.loads((self._kept / "seconds").read_text()))
            return True

        def wait(self) -> None:
            if self.was_there:
                return
            super().wait()
            if self._kept is not None:
                with contextlib.suppress(OSError):
                    _keep(self._kept, self._target, self.seconds)

        def kill(self) -> None:
            if not self.was_there:
                super().kill()

    for user in (bare, container):
        user.Command = Command  # type: ignore[attr-defined]


def _digest(words: Sequence[str], directory: Path) -> str:
    """Of the command and the text that it reads, wherever it works.

    The headers that it reads are those of the installed torch and compiler, and precompiled ones:
    these stay what they are while tests run.
    """
    place = str(directory)
    digest = hashlib.sha256("\0".join(word.replace(place, ".") for word in words).encode())
    digest.update(str(shutil.which("as")).encode())  # which the compiler takes from PATH
    for word in words:
        if word.endswith((".cpp", ".S")):
            digest.update((directory / word).read_bytes().replace(place.encode(), b"."))
    return digest.hexdigest()


def _keep(kept: Path, target: Path, seconds: float) -> None:
    unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        shutil.copyfile(target, unfinished / "object")
        (unfinished / "seconds").write_text(json.dumps(seconds))
        unfinished.rename(kept)  # fails where another worker was quicker
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
