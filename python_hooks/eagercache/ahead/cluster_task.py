"""What a machine of a cluster does for a warm-up elsewhere: it compiles calls, and sends entries.

An engine imports `compile_batch` by name, so that its machines need eagercache, of the same version
as whoever asks. Entries travel as they lie in a remote: signed, with their objects beside them.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagercache.ahead.errors import WarmError
from eagercache.ahead.machine import compile_service, open_store
from eagercache.base import config, environment
from eagercache.base.load import core, usable, why_unavailable
from eagercache.remote.entries import Exchange, describe
from eagercache.remote.place import TooLarge
from eagercache.remote.plan import RemotePlan
from eagercache.remote.tier import Tier
from eagercache.service.request import Response
from eagercache.service.service import CompileService


@dataclass(frozen=True)
class Job:
    """What all batches of a warm-up have in common.

    Attributes:
        environment: the environment key's text of who asks.
        signing_key: the text of a private key that is made for this warm-up alone.
        public_key: the other half, in hexadecimal digits.
        keys: of the dispatcher.
    """

    environment: str
    choose: str
    numerics: str
    search: str
    signing_key: str
    public_key: str
    keys: tuple[str, ...]


@dataclass
class Compiled:
    """What came of a batch.

    Attributes:
        machine: its name.
        responses: one for each call.
        named: entries and objects, as they lie in a remote.
        trouble: why nothing was done.
    """

    machine: str
    responses: list[Response] = field(default_factory=list)
    named: dict[str, bytes] = field(default_factory=dict)
    trouble: str = ""


class Parcel:
    """A remote that is a dictionary on its way to another process. See `Place`."""

    def __init__(self, named: dict[str, bytes] | None = None) -> None:
        self.named = {} if named is None else named

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        """As `Place.get`."""
        content = self.named.get(name)
        if content is not None and len(content) > most:
            raise TooLarge(f"more than {most} bytes")
        return content

    def size(self, name: str, seconds: float) -> int | None:
        """As `Place.size`."""
        content = self.named.get(name)
        return None if content is None else len(content)

    def put(self, name: str, content: bytes, seconds: float) -> None:
        """As `Place.put`."""
        self.named[name] = content

    def missing(self, seconds: float) -> str | None:
        """As `Place.missing`."""
        return None


def compile_batch(job: Job, descriptions: Sequence[dict[str, Any]]) -> Compiled:
    """Compiles calls on this machine. Raises nothing that is this machine's or a call's fault."""
    compiled = Compiled(socket.gethostname())
    if not usable():
        compiled.trouble = why_unavailable()
        return compiled
    settings = config.read_settings()
    try:
        store, text = open_store(settings, None)
    except WarmError as error:
        compiled.trouble = str(error)
        return compiled
    differing = environment.mismatches(text, job.environment, environment.SHARED_FIELDS)
    if differing:
        compiled.trouble = describe(differing)
        return compiled
    with _Lent(job, settings, store.root, text) as service:
        compiled.responses = _answers(service, descriptions)
    _pack(job, store, text, compiled)
    return compiled


class _Lent:
    """A compile service with one worker, for one batch at a time. It stays for the next ones.

    Its worker ends when it has had nothing to do for a while, and with this process.
    """

    _lock = threading.Lock()
    _idle: dict[tuple[Any, ...], list[CompileService]] = {}  # noqa: RUF012 - guarded by the lock

    def __init__(self, job: Job, settings: config.Settings, root: str, text: str) -> None:
        self._of = (job.choose, job.numerics, job.search, job.keys, root, text, os.getpid())
        self._make = lambda: compile_service(
            settings,
            root,
            text,
            choose=job.choose,
            numerics=job.numerics,
            search=job.search,
            workers=1,
            slots=os.cpu_count() or 1,  # how many work at once is the engine's to say
            keys=job.keys,
        )

    def __enter__(self) -> CompileService:
        with self._lock:
            idle = self._idle.setdefault(self._of, [])
            self._service = idle.pop() if idle else self._make()
        return self._service

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._idle[self._of].append(self._service)


def _answers(service: CompileService, descriptions: Sequence[dict[str, Any]]) -> list[Response]:
    answers: dict[int, Response] = {}
    arrived = threading.Semaphore(0)
    for index, description in enumerate(descriptions):

        def done(response: Response, index: int = index) -> None:
            answers[index] = response
            arrived.release()

        service.submit(description, done)
    for _ in descriptions:
        arrived.acquire()
    return [answers[index] for index in range(len(descriptions))]


def _pack(job: Job, store: Any, text: str, compiled: Compiled) -> None:
    """Signs the verdicts, and adds them to what is sent. Failures stay where they happened."""
    assert core is not None
    with tempfile.TemporaryDirectory(prefix="eagercache-warm-") as folder:
        key = Path(folder) / "key.pem"
        key.touch(mode=0o600)
        key.write_text(job.signing_key)
        exchange = Exchange(store, text, RemotePlan((), (job.public_key,), str(key)))
        tier = parcel_tier(Parcel(compiled.named))
        for response in compiled.responses:
            if response.get("verdict") not in ("kernel", "native"):
                continue
            try:
                exchange.send(tier, str(response["digest"]))
            except core.StoreError as error:
                response.update(
                    verdict="failed", reason=f"it cannot be sent: {error}", failure="transient"
                )


def parcel_tier(parcel: Parcel) -> Tier:
    """A tier whose requests are answered at once."""
    return Tier("memory://parcel", place=parcel)
