"""Which kernel breaks a program: the command is run with fewer and fewer of the store's kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eagercache.calls.texts import counted

Item = TypeVar("Item")


class NothingToFind(Exception):
    """The command does not fail because of kernels of this store. The text says what was seen."""


class CommandMissing(Exception):
    """There is no such command, or it may not be run."""


@dataclass(frozen=True)
class Culprit:
    """What a failing command passes without.

    Attributes:
        operators: the smallest set of operators found ("aten::var.correction").
        kernels: of those operators, the entries of the store whose removal is enough.
        runs: how often the command was run.
    """

    operators: tuple[str, ...]
    kernels: tuple[Mapping[str, Any], ...] = field(repr=False)
    runs: int = 0


def smallest_set(items: Sequence[Item], passes_without: Callable[[set[Item]], bool]) -> list[Item]:
    """A set of items without which it passes, none of which can be spared.

    It passes without all of `items`. Halves first, then finer (Zeller's delta debugging), so that a
    single culprit among n costs about 2 log2(n) questions.
    """
    left = list(items)
    parts = 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        chunks = [left[i : i + size] for i in range(0, len(left), size)]
        smaller = next((c for c in chunks if len(c) < len(left) and passes_without(set(c))), None)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        rest = [[item for item in left if item not in chunk] for chunk in chunks]
        smaller = next((r for r in rest if r and len(chunks) > 2 and passes_without(set(r))), None)
        if smaller is not None:
            left, parts = smaller, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return left


class StoreWithout:
    """Runs a command on copies of a store that lack some entries; nothing is ever compiled."""

    def __init__(
        self,
        core: Any,
        store: Path,
        environment_text: str,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        quiet: bool = True,
    ) -> None:
        self._core = core
        self._store = store
        self._environment_text = environment_text
        self._command = list(command)
        self._timeout = timeout
        self._output = subprocess.DEVNULL if quiet else None
        self.runs = 0

    def passes(self, without: Iterable[str]) -> bool:
        """Whether the command ends with exit status 0 when the entries of these keys are gone."""
        self.runs += 1
        with tempfile.TemporaryDirectory(prefix="eagercache-bisect-") as folder:
            copy = Path(folder) / "store"
            shutil.copytree(self._store, copy, copy_function=_link, symlinks=True)
            copy.chmod(0o700)
            opened = self._core.Store(str(copy), self._environment_text, read_only=False)
            for key in without:
                opened.remove(key)
            del opened
            return self._run(copy)

    def _run(self, store: Path) -> bool:
        environment = {**os.environ, "EAGERCACHE_DIR": str(store), "EAGERCACHE_ON_MISS": "native"}
        try:
            done = subprocess.run(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        except OSError as error:
            raise CommandMissing(
                f"{self._command[0]} cannot be started: {error.strerror}"
            ) from error
        return done.returncode == 0


def _link(source: str, target: str) -> str:
    """A second name for a file that never changes; a copy where file systems differ."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def bisect(
    entries: Sequence[Mapping[str, Any]],
    passes: Callable[[Iterable[str]], bool],
    say: Callable[[str], None] = lambda text: None,
    suspects: str = "",
) -> Culprit:
    """The operators, then the kernels, without which the command passes.

    Args:
        entries: the store's entries; only kernels are of interest.
        passes: whether the command passes without the entries of these keys.
        say: called with a line of progress before each stage.
        suspects: which kernels of the store `entries` are, where they are not all.

    Raises NothingToFind.
    """
    kernels = [entry for entry in entries if entry["kind"] == "kernel"]
    if not kernels:
        raise NothingToFind(f"the store holds no kernel for this environment{suspects}")
    by_operator: dict[str, list[Mapping[str, Any]]] = {}
    for entry in kernels:
        by_operator.setdefault(entry["facts"].get("op", "?"), []).append(entry)
    say(f"{counted(len(kernels), 'kernel')} of {counted(len(by_operator), 'operator')}")
    if passes(()):
        raise NothingToFind("the command passes with all kernels")
    if not passes([entry["key"] for entry in kernels]):
        raise NothingToFind(
            "the command fails without any kernel too, or it uses another store (cache_dir=)"
        )

    def without_operators(names: set[str]) -> bool:
        return passes([entry["key"] for name in names for entry in by_operator[name]])

    operators = smallest_set(sorted(by_operator), without_operators)
    say(f"it passes without {', '.join(operators)}")
    keys = [entry["key"] for name in operators for entry in by_operator[name]]
    found = set(smallest_set(keys, lambda chosen: passes(chosen)))
    return Culprit(
        operators=tuple(operators),
        kernels=tuple(entry for entry in kernels if entry["key"] in found),
    )
