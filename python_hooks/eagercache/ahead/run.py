"""A warm-up under way: what an executor is handed, and what its answers teach.

It hands over a few seconds' worth at a time, so that order and budget hold.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from eagercache.ahead.budget import Budget
from eagercache.ahead.experience import USUAL_BYTES, Experience
from eagercache.ahead.plan import measure_gain, take_known
from eagercache.ahead.report import Planned
from eagercache.service.request import cpu_seconds

START_SECONDS = 8.0  # of a worker, torch's import included
# Of requests that an executor is given at a time, for each worker: so many that kernels are built
# together, few enough for the budget and the order to hold. A larger one goes alone.
SECONDS_UNDER_WAY = 20.0


class Executor(Protocol):
    """Compiles calls, somewhere. `on_done` is called once for each, on any thread."""

    def submit(
        self, description: dict[str, Any], on_done: Callable[[dict[str, Any]], None], /
    ) -> None:
        """Queues one call."""

    def close(self) -> None:
        """Ends at once: what is under way is answered with a failure."""


Progress = Callable[["Run"], None]


class Run:
    """A warm-up under way. `left`, `done` and `seconds_left` may be read from `progress`."""

    def __init__(
        self,
        entries: Sequence[Planned],
        store: Any,
        experience: Experience,
        executor: Executor,
        budget: Budget,
        workers: int,
        began: float,
    ) -> None:
        self.done = 0
        self.bytes = 0
        self.total = len(entries)
        self._entries = entries
        self._store = store
        self._experience = experience
        self._executor = executor
        self._budget = budget
        self._workers = workers
        self._began = began
        self._submitting = time.monotonic()
        self._expected_done = 0.0  # seconds that were expected of what is done
        self._left = sum(entry.seconds for entry in entries)  # expected of what is not
        self._changed = threading.Condition()
        self._outstanding: dict[str, Planned] = {}
        self._answers: list[tuple[Planned, dict[str, Any]]] = []
        self._objects: set[str] = set()
        self._closed = False

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def _pace(self) -> float:
        """Wall seconds for one expected second of CPU time, the workers' start included."""
        if self._expected_done == 0.0:
            return 1.0 / self._workers
        return (time.monotonic() - self._submitting) / self._expected_done

    def seconds_left(self) -> float:
        """Until the end, as far as can be told."""
        left = self._left * self._pace() + (START_SECONDS if self.done == 0 else 0.0)
        if self._budget.seconds is not None:
            left = min(left, max(0.0, self._budget.seconds - self.elapsed))
        return left

    def run(self, progress: Progress) -> None:
        """Compiles until all is done or the budget ends. Ctrl-C passes, once all is closed."""
        waiting = list(self._entries)
        try:
            while waiting or self._outstanding:
                if self._over():
                    break
                while (entry := self._next(waiting)) is not None:
                    waiting.remove(entry)
                    self._submit(entry)
                if not self._outstanding:
                    break  # the budget has no room for one more
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._answers), 0.2)
                if self._take_answers():
                    self._order(waiting)
                progress(self)
        finally:
            with self._changed:
                self._closed = True
            self._executor.close()
            self._take_answers()
            self._look_for_unanswered()

    def _look_for_unanswered(self) -> None:
        """Workers may have published what they could not tell any more."""
        for entry in self._outstanding.values():
            if (manifest := self._store.find(entry.digest)) is not None:
                take_known(entry, manifest)
                entry.state = "compiled"

    def _order(self, waiting: list[Planned]) -> None:
        """What was found out about operators says more about their other keys."""
        for entry in waiting:
            entry.gain_ns = entry.native_ns * self._experience.share_saved(entry.call.name)
        waiting.sort(key=lambda entry: -entry.gain_ns)

    def _over(self) -> bool:
        if self._budget.bytes is not None and self.bytes >= self._budget.bytes:
            return True
        return self._budget.seconds is not None and self.elapsed >= self._budget.seconds

    def _next(self, waiting: Sequence[Planned]) -> Planned | None:
        """The first entry that is due now; one that the budget has no room for is passed over."""
        count, seconds = len(self._outstanding), sum(e.seconds for e in self._outstanding.values())
        if count >= self._workers and seconds >= SECONDS_UNDER_WAY * self._workers:
            return None
        if self._budget.bytes is not None:
            each_bytes = self.bytes / self.done if self.done else USUAL_BYTES
            if self.bytes + (count + 1) * each_bytes > self._budget.bytes:
                return None
        if self._budget.seconds is None:
            return waiting[0] if waiting else None
        room = (self._budget.seconds - self.elapsed) / self._pace() - seconds
        return next((entry for entry in waiting if entry.seconds <= room), None)

    def _submit(self, entry: Planned) -> None:
        self._outstanding[entry.digest] = entry

        def done(response: dict[str, Any]) -> None:
            with self._changed:
                if not self._closed:
                    self._answers.append((entry, response))
                    self._changed.notify()

        self._executor.submit(entry.description, done)

    def _take_answers(self) -> bool:
        """Whether there were any."""
        with self._changed:
            answers, self._answers = self._answers, []
        for entry, response in answers:
            del self._outstanding[entry.digest]
            self.done += 1
            self._expected_done += entry.seconds
            self._left -= entry.seconds
            self._conclude(entry, response)
        return bool(answers)

    def _conclude(self, entry: Planned, response: Mapping[str, Any]) -> None:
        entry.verdict = str(response.get("verdict", "failed"))
        entry.reason = str(response.get("reason", ""))
        entry.seconds = cpu_seconds(response)
        entry.transient = response.get("failure") == "transient"
        entry.state = "compiled"
        if entry.verdict == "failed":
            entry.state = "ineligible" if _ASIDE in entry.reason else "failed"
        elif response.get("found"):
            entry.state = "found"
        manifest = self._store.find(entry.digest)
        known = manifest["facts"] if manifest is not None else {}
        measure_gain(entry, known)
        if manifest is None or response.get("found"):
            return
        self._experience.add(manifest)
        self.bytes += len(json.dumps(manifest))
        for item in manifest["objects"]:
            if item["digest"] not in self._objects:
                self._objects.add(item["digest"])
                self.bytes += item["size"]


_ASIDE = "steps aside"  # of prove.capture
