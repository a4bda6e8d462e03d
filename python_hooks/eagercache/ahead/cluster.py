"""A warm-up's executor whose compilers are on other machines: batches, retries, and what came.

One thread of ours does all of it: it hands batches to an engine, and publishes in the store what
comes back, after the checks that an entry of a remote gets.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagercache.ahead.cluster_task import Compiled, Job, Parcel, compile_batch, parcel_tier
from eagercache.ahead.engines import Engine
from eagercache.base.load import core
from eagercache.remote.entries import Exchange, Refused
from eagercache.remote.place import PlaceError
from eagercache.remote.plan import RemotePlan
from eagercache.service.request import Response, failure_of

log = logging.getLogger("eagercache")

OnDone = Callable[[Response], None]

# Kernels that a worker builds together cost a fraction of as many single ones; more of them at a
# time would leave one worker busy at the end while others have nothing to do.
MOST_TOGETHER = 8
# Of a call whose machines were lost.
ATTEMPTS = 3
# Calls are handed over one by one: so long are they waited for before a batch is made of them.
_GATHER_SECONDS = 0.05


@dataclass
class _Asked:
    description: dict[str, Any]
    on_done: OnDone
    attempts: int = 0
    answered: bool = False

    def answer(self, response: Response) -> None:
        """Once, whatever happens."""
        if not self.answered:
            self.answered = True
            self.on_done(response)


@dataclass
class ClusterCounts:
    """What became of batches.

    Attributes:
        machines: batches that each machine answered.
        lost: batches whose machine was lost.
        refused: entries and batches that were not taken, by reason.
    """

    machines: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class ClusterExecutor:
    """See `run.Executor`. ``counts`` may be read once it is closed."""

    def __init__(
        self,
        engine: Engine,
        store: Any,
        environment: str,
        *,
        choose: str,
        numerics: str,
        search: str,
        keys: tuple[str, ...],
    ) -> None:
        self.counts = ClusterCounts()
        self._engine = engine
        key, public = _pair_of_keys()
        self._job = Job(environment, choose, numerics, search, key, public, keys)
        self._exchange = Exchange(store, environment, RemotePlan((), (public,)))
        # None: it is closed.
        self._events: queue.SimpleQueue[_Asked | tuple[list[_Asked], Future[Any]] | None]
        self._events = queue.SimpleQueue()
        self._waiting: deque[_Asked] = deque()
        self._under_way: dict[Future[Any], list[_Asked]] = {}
        self._thread = threading.Thread(target=self._serve, name="eagercache-cluster", daemon=True)
        self._thread.start()

    def submit(self, description: dict[str, Any], on_done: OnDone, /) -> None:
        """As `Executor.submit`."""
        self._events.put(_Asked(description, on_done))

    def close(self) -> None:
        """As `Executor.close`. What workers have compiled by now stays in their stores."""
        self._events.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._take(self._events.get()):
                end = time.monotonic() + _GATHER_SECONDS
                with contextlib.suppress(queue.Empty):
                    while (left := end - time.monotonic()) > 0:
                        if not self._take(self._events.get(timeout=left)):
                            return
                self._hand_out()
        finally:
            unanswered = [*self._waiting, *(a for batch in self._under_way.values() for a in batch)]
            self._fail(unanswered, "the warm-up has ended")
            with contextlib.suppress(Exception):  # a cluster that is gone
                self._engine.close()

    def _take(self, event: _Asked | tuple[list[_Asked], Future[Any]] | None) -> bool:
        """Whether it goes on."""
        if event is None:
            return False
        if isinstance(event, _Asked):
            self._waiting.append(event)
        else:
            batch, future = event
            del self._under_way[future]
            try:
                self._conclude(batch, future)
            except Exception as error:  # of a machine that sends what nobody expects
                log.exception("a batch of a warm-up could not be taken")
                self._fail(batch, f"{type(error).__name__}: {error}")
        return True

    def _hand_out(self) -> None:
        while self._waiting and (free := self._engine.workers - len(self._under_way)) > 0:
            batch = [self._waiting.popleft()]
            most = min(MOST_TOGETHER, -(-(len(self._waiting) + 1) // free))
            # One that a machine was lost with goes alone.
            while len(batch) < most and not batch[0].attempts and self._waiting:
                if self._waiting[0].attempts:
                    break
                batch.append(self._waiting.popleft())
            try:
                future = self._engine.submit(
                    compile_batch, self._job, [asked.description for asked in batch]
                )
            except Exception as error:
                self._note_trouble(batch, error)
                continue
            self._under_way[future] = batch
            future.add_done_callback(lambda done, batch=batch: self._events.put((batch, done)))  # type: ignore[misc]

    def _conclude(self, batch: list[_Asked], future: Future[Any]) -> None:
        try:
            compiled: Compiled = future.result()
        except BaseException as error:
            self._note_trouble(batch, error)
            return
        self.counts.machines[compiled.machine] += 1
        if compiled.trouble:
            self.counts.refused[f"{compiled.machine}: {compiled.trouble}"] += 1
            self._fail(batch, f"{compiled.machine}: {compiled.trouble}")
            return
        tier = parcel_tier(Parcel(compiled.named))
        for asked, response in zip(batch, compiled.responses, strict=True):
            if response.get("verdict") in ("kernel", "native"):
                response = self._published(asked, response, tier)
            asked.answer(response)

    def _published(self, asked: _Asked, response: Response, tier: Any) -> Response:
        """The response, once the store has its entry; a failure where that cannot be."""
        assert core is not None
        digest = str(asked.description["digest"])
        if self._exchange.store.find(digest) is not None:
            return response  # published already, by a worker that shares our disk
        try:
            if self._exchange.fetch(tier, digest) is not None:
                return response
            kind = reason = "a machine sent no entry with its answer"
        except (Refused, PlaceError, core.StoreError) as error:
            kind = error.kind if isinstance(error, Refused) else type(error).__name__
            reason = str(error)
        self.counts.refused[kind] += 1
        return failure_of(asked.description, reason, transient=True)

    def _note_trouble(self, batch: list[_Asked], error: BaseException) -> None:
        """Has those tried again, one by one, whose machine was lost; fails the others."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not self._engine.lost(error):
            self._fail(batch, reason)
            return
        self.counts.lost += 1
        for asked in batch:
            asked.attempts += 1
            if asked.attempts < ATTEMPTS:
                self._waiting.append(asked)
            else:
                self._fail([asked], f"its machine was lost {ATTEMPTS} times, last by {reason}")

    @staticmethod
    def _fail(batch: list[_Asked], reason: str) -> None:
        for asked in batch:
            asked.answer(failure_of(asked.description, reason, transient=True))


def _pair_of_keys() -> tuple[str, str]:
    """(text of a private key, its public key): for one warm-up, whose workers sign with it."""
    assert core is not None
    with tempfile.TemporaryDirectory(prefix="eagercache-warm-") as folder:
        private, public = Path(folder) / "key.pem", Path(folder) / "key.pub"
        core.make_signing_key(str(private), str(public))
        return private.read_text(), str(core.public_key(str(public)))
