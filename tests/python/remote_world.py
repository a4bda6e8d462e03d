"""Stores that never share a disk, and a remote between them, for tests of remotes."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagercache import _C
from eagercache.base.machine_kind import kind_for
from eagercache.remote.entries import Exchange
from eagercache.remote.plan import RemotePlan
from eagercache.remote.tier import Tier

# An environment key's text, as far as machines must have it in common.
TEXT = "torch.version: 2.11.0\ncompiler.version: 12\ncpu.isa: avx2\n"


def key_of(number: int) -> str:
    return hashlib.sha256(f"key {number}".encode()).hexdigest()


@functools.cache
def _library() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nothing.so"
        command = ["g++", "-shared", "-nostdlib", "-xc++", "-", "-o", str(path)]
        subprocess.run(command, input=b"", check=True)
        return path.read_bytes()


def object_of(number: int) -> bytes:
    """Stands for a kernel's file: a shared object, which nothing here loads."""
    return _library() + f"object {number}".encode()


def tier_of(url: str, seconds: float = 20.0) -> Tier:
    return Tier(url, seconds=seconds, sleep=lambda delay: None)


@dataclass
class World:
    """A folder with the pairs of keys `own` and `other`, and stores by name."""

    folder: Path

    def __post_init__(self) -> None:
        for name in ("own", "other"):
            _C.make_signing_key(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.pub"))

    def plan(self, url: str, *, key: str = "own", trust: str = "own", signs: bool = True) -> Any:
        trusted = _C.public_key(str(self.folder / f"{trust}.pub"))
        return RemotePlan((url,), (trusted,), str(self.folder / f"{key}.pem") if signs else None)

    def store(self, name: str, text: str = TEXT) -> Any:
        return _C.Store(str(self.folder / name), text)

    def filled(self, name: str, *numbers: int, text: str = TEXT) -> Any:
        """A store with a kernel of one object for each odd number, and else a decision."""
        store = self.store(name, text)
        for number in numbers:
            facts = {"op": "aten::abs", "number": str(number), "machine": kind_for("CPU")}
            if number % 2:
                path = self.folder / f"{number}.so"
                path.write_bytes(object_of(number))
                row = {"key": key_of(number), "kind": "kernel", "facts": facts}
                store.publish(row, [("so", str(path))])
            else:
                store.publish({"key": key_of(number), "kind": "native", "facts": facts})
        return store

    def exchange(self, store: Any, url: str, text: str = TEXT, **options: Any) -> Exchange:
        return Exchange(store, text, self.plan(url, **options))
