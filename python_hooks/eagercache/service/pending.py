"""Requests that were open when their program ended, as files in the store's folder PENDING.

A file holds one request and is named after the environment and the digest of its entry, so that
programs that left the same request left one file, and whoever goes on takes those of its own
environment. Requests of modules hold pickled code of the program. So the folder is used only where
nobody else can have written it, and files are read as `private_file` reads. The program's
environment variables are not among what is stored.

There are at most `MOST_REQUESTS` files of `MOST_BYTES` together, and each expires.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagercache.base import config, private_file
from eagercache.base.store_directory import PENDING_FOLDER
from eagercache.service.cuda_gate import bytes_wanted
from eagercache.service.gpu_watch import UUID
from eagercache.service.request import Request, expected_gain

MOST_REQUESTS = 256
MOST_BYTES = 64 << 20
MOST_REQUEST_BYTES = 8 << 20
EXPIRES_SECONDS = 7 * 24 * 3600.0
# What was begun so often without an end that can be kept is given up.
MOST_ATTEMPTS = 2
# A program that ends does not write for longer. The most useful requests are written first.
WRITE_SECONDS = 0.03

_VERSION = 2
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PendingRequest:
    """One request out of a file.

    Attributes:
        attempts: so often it was begun since its program ended.
        crashes: workers that were lost over it, in its program too.
        gpu: the UUID of the GPU that it was for; empty of a call on the CPU.
    """

    name: str
    description: Mapping[str, Any]
    choose: str
    numerics: str
    margin: float
    created: float
    attempts: int = 0
    crashes: int = 0
    gpu: str = ""

    @property
    def digest(self) -> str:
        """The store's name for its entry."""
        return str(self.description["digest"])

    def text(self) -> str:
        """The content of its file."""
        body = {key: value for key, value in vars(self).items() if key != "name"}
        return json.dumps({"version": _VERSION, **body})


def scope_of(environment: str) -> str:
    """What the names of files of one environment begin with."""
    return hashlib.sha256(environment.encode()).hexdigest()[:16]


class PendingFolder:
    """The pending requests of one store."""

    def __init__(self, store_root: str | Path) -> None:
        self.path = Path(store_root) / PENDING_FOLDER

    def make(self) -> bool:
        """Makes the folder where there is none; False where nothing may be left in it."""
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
        except OSError:
            return False
        return self.usable()

    def usable(self) -> bool:
        """Whether nobody else can have written or can read what is there."""
        try:
            closed = not self.path.lstat().st_mode & 0o077
        except OSError:
            return False
        return closed and private_file.is_private(self.path)

    def count(self, environment: str) -> tuple[int, int]:
        """Files of this environment, and of all."""
        names = [name for name, _ in self._files()]
        scope = scope_of(environment)
        return sum(name.startswith(scope) for name in names), len(names)

    def write(
        self,
        requests: Iterable[Request],
        environment: str,
        gpus: Mapping[int | None, str] | None = None,
    ) -> int:
        """Leaves requests, those first of which most is expected; how many there was room for.

        ``gpus`` has the UUIDs of the GPUs by the program's count: the requests of others are not
        left.
        """
        wanted = sorted(requests, key=lambda r: -expected_gain(r.description))[:MOST_REQUESTS]
        if not wanted or not self.make():
            return 0
        ends = time.monotonic() + WRITE_SECONDS
        private_file.remove_abandoned(self.path, "*.json.new")
        held = sum(size for _, size in self._make_room(len(wanted)))
        scope, now, written = scope_of(environment), time.time(), 0
        for request in wanted:
            if time.monotonic() > ends:
                break
            left = _pending(request, scope, now, gpus or {})
            text = left.text() if left is not None else ""
            if left is None or len(text) > min(MOST_REQUEST_BYTES, MOST_BYTES - held):
                continue
            try:
                private_file.put(self.path, left.name, text)
            except OSError:
                break
            held += len(text)
            written += 1
        return written

    def read(self, environment: str) -> list[PendingRequest]:
        """The requests of this environment, most useful first. Files that are none are removed."""
        if not self.usable():
            return []
        scope, found = scope_of(environment), []
        for name, _ in self._files():
            if name.startswith(scope):
                request = self.read_one(name)
                if request is None:
                    self.remove(name)
                else:
                    found.append(request)
        return sorted(found, key=lambda one: -expected_gain(one.description))

    def read_one(self, name: str) -> PendingRequest | None:
        """What a file holds; None where that is no request that may still be answered."""
        content = private_file.read(self.path, name, MOST_REQUEST_BYTES)
        try:
            request = _parse(name, content)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None
        # A clock that was put back dates what was left ahead.
        fresh = abs(time.time() - request.created) < EXPIRES_SECONDS
        return request if fresh and request.attempts < MOST_ATTEMPTS else None

    def begin(self, request: PendingRequest) -> PendingRequest:
        """Notes one more attempt, before anything can end it."""
        begun = replace(request, attempts=request.attempts + 1)
        self._rewrite(begun)
        return begun

    def put_back(self, request: PendingRequest) -> None:
        """Takes back what `begin` noted: whoever was at it was asked to end."""
        self._rewrite(replace(request, attempts=request.attempts - 1))

    def remove(self, name: str) -> None:
        """Of a request that has its answer."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    def _rewrite(self, request: PendingRequest) -> None:
        with contextlib.suppress(OSError):
            if (self.path / request.name).exists():  # the cache may have been cleared
                private_file.put(self.path, request.name, request.text())

    def _files(self) -> list[tuple[str, int]]:
        """Names and sizes, the oldest first."""
        return [(name, size) for _, name, size in sorted(self._entries())]

    def _entries(self) -> Iterator[tuple[float, str, int]]:
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            yield status.st_mtime, entry.name, status.st_size

    def _make_room(self, wanted: int) -> list[tuple[str, int]]:
        """Removes what has expired, then the oldest until so many more have room; what stays."""
        kept = []
        for changed, name, size in sorted(self._entries()):
            if abs(time.time() - changed) > EXPIRES_SECONDS:
                self.remove(name)
            else:
                kept.append((name, size))
        while kept and len(kept) + wanted > MOST_REQUESTS:
            self.remove(kept.pop(0)[0])
        while kept and sum(size for _, size in kept) > MOST_BYTES // 2:
            self.remove(kept.pop(0)[0])
        return kept


def _pending(
    request: Request, scope: str, now: float, gpus: Mapping[int | None, str]
) -> PendingRequest | None:
    """None for what no other process can answer."""
    digest, settings = str(request.description.get("digest", "")), request.settings
    if request.again or not _DIGEST.fullmatch(digest):
        return None
    if settings.gpu is not None and settings.gpu not in gpus:
        return None
    return PendingRequest(
        f"{scope}-{digest}.json",
        request.description,
        settings.choose,
        settings.numerics,
        settings.margin,
        now,
        crashes=request.crashes,
        gpu=gpus.get(settings.gpu, ""),
    )


def _parse(name: str, content: Any) -> PendingRequest:
    """Raises what reading a file of another form leads to."""
    if content["version"] != _VERSION:
        raise ValueError("another version")
    description = content["description"]
    request = PendingRequest(
        name,
        description,
        str(content["choose"]),
        str(content["numerics"]),
        float(content["margin"]),
        float(content["created"]),
        int(content["attempts"]),
        int(content["crashes"]),
        str(content["gpu"]),
    )
    if not isinstance(description, dict) or not name.endswith(f"-{description['digest']}.json"):
        raise ValueError("it is not what its name says")
    if not isinstance(description["op"], str):
        raise TypeError("it names no operator")
    if description.get("dispatch_key") != ("CUDA" if request.gpu else "CPU"):
        raise ValueError("it is for another device")
    if request.gpu and not UUID.fullmatch(request.gpu):
        raise ValueError("it names no GPU")
    if request.choose not in config.CHOOSE or request.numerics not in config.NUMERICS:
        raise ValueError("it has a policy that there is not")
    if not 0.0 <= request.margin <= 1.0 or not math.isfinite(request.created):
        raise ValueError("it has numbers that cannot be")
    if min(request.attempts, request.crashes) < 0:
        raise ValueError("it has counts that cannot be")
    # Who orders requests, or asks whether a GPU has room for one, reads it without a check.
    expected_gain(description)
    if request.gpu:
        bytes_wanted(description)
    return request
