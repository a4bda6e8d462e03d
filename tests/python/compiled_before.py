"""What the compiler made of the same text once, for the workers of tests.

Tests fill stores of their own, and some with the same kernels: those of another machine's store, or
of the same module in another program. What a compile made is kept in the folder that these workers
share, under a digest of all that it is made from, and copied to where the same is asked for again.
It is linked, loaded, proved and timed each time.

Two kernels of one text would differ in the names of their files, which Inductor makes of what is in
them, and in the entry's identity, which a wrapper has as a constant of one length. These names
count for nothing here, and the identity is put into the copy.

Only compiles by the compiler that is found when nobody names one are kept: another one is what a
test is about.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from eagercache.worker.inductor import bare, commands, container

# Precompiled headers and common objects are shared as they are; weights are in files beside them.
_STEPS = ("kernel", "wrapper")
_NAMES = re.compile(rb"\bc[a-z2-7]{51}\b")  # of files, as Inductor makes them
_NAMED = re.compile(rb"\A// Triton kernels are embedded as comments in [^\n]*")
_MADE_FOR = re.compile(rb'(?<=eagercache_made_for\[\] =\n    ")[0-9a-f]{64}(?=\\n")')
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
            self._identity = b""
            if step in _STEPS and "-c" in words and words[0] == compiler:
                digest, self._identity = _digest(words, directory)
                self._kept = objects / digest
                self._target = directory / words[list(words).index("-o") + 1]
            self.was_there = self._take()
            if not self.was_there:
                super().__init__(step, words, directory)
            self.step = step

        def _take(self) -> bool:
            if self._kept is None or not self._kept.exists():
                return False
            try:
                content = (self._kept / "object").read_bytes()
                before = (self._kept / "identity").read_bytes()
                if before and content.count(before) != 1:
                    return False
                self._target.write_bytes(content.replace(before, self._identity))
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
                    _keep(self._kept, self._target, self.seconds, self._identity)

        def kill(self) -> None:
            if not self.was_there:
                super().kill()

    for user in (bare, container):
        user.Command = Command  # type: ignore[attr-defined]


def _digest(words: Sequence[str], directory: Path) -> tuple[str, bytes]:
    """Of the command and the text that it reads, wherever it works; and the identity in the text.

    The headers that it reads are those of the installed torch and compiler, and precompiled ones:
    these stay what they are while tests run.
    """
    place, identity = str(directory), b""
    command = "\0".join(word.replace(place, ".") for word in words)
    digest = hashlib.sha256(_NAMES.sub(b"name", command.encode()))
    digest.update(str(shutil.which("as")).encode())  # which the compiler takes from PATH
    for word in words:
        if word.endswith((".cpp", ".S")):
            text = (directory / word).read_bytes().replace(place.encode(), b".")
            found = _MADE_FOR.search(text)
            if found is not None:
                identity = found.group()
                text = text.replace(identity, bytes(len(identity)))
            digest.update(_NAMED.sub(b"", text))
    return digest.hexdigest(), identity


def _keep(kept: Path, target: Path, seconds: float, identity: bytes) -> None:
    unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        shutil.copyfile(target, unfinished / "object")
        (unfinished / "seconds").write_text(json.dumps(seconds))
        (unfinished / "identity").write_bytes(identity)
        unfinished.rename(kept)  # fails where another worker was quicker
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
