"""eagercache in this process: hooks on all operators, and kernels compiled in bulk."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eagercache
from eagercache.base.load import core
from eagercache.runtime import session as sessions
from eagercache.service.request import cpu_seconds
from eagercache.service.service import CompileService
from eagercache.service.settings import CUDA_WORKER_BYTES, ServiceSettings

# A batch of this many kernels shares one run of the C++ compiler.
LARGEST_BATCH = 24
# Characters of a described call's arguments; those of lists are longer.
LONG_ARGUMENTS = 3000
# Of entries whose kernels disagree: so many, and what is told of each.
MOST_ENTRIES = 4
TOLD = ("numerics", "largest_error_ulp", "native_error_ulp", "fills", "kernels", "form")


@dataclass
class Compiled:
    """What became of requests for kernels.

    Attributes:
        verdicts: by digest, of those that were answered.
        failures: reasons of those that ended without a kernel or a decision.
        seconds: CPU time of the workers.
        cut: the time was over before all were answered.
    """

    verdicts: dict[str, str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    asked: int = 0
    cut: bool = False


@dataclass(frozen=True)
class Answer:
    """What answers a call now: "hit", "native", "aside" or "miss", and why."""

    outcome: str
    reason: str


class Answering:
    """A block, to be entered any number of times, in which kernels may answer."""

    def __enter__(self) -> None:
        core.set_answering(True)

    def __exit__(self, *_: object) -> None:
        core.set_answering(False)


class Ours:
    """Hooks every eligible operator of a device; kernels come out of a store of our own.

    Nothing is compiled by calls: `record` notes the keys that calls have, `compile` makes their
    kernels, and `forget` has the next calls ask the store.
    """

    def __init__(self, store: Path, device: str) -> None:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.device = device
        self._service: CompileService | None = None
        eagercache.enable(
            "all", devices=[device], on_miss="native", choose="always", cache_dir=store
        )
        if not eagercache.is_enabled():
            raise RuntimeError(f"eagercache cannot use the store {store}")
        core.set_answering(False)
        self.forget()
        key = "CPU" if device == "cpu" else "CUDA"
        self.hooked = {row["op"] for row in core.operator_stats() if row["dispatch_key"] == key}

    def answering(self) -> Answering:
        """Kernels may answer the block's calls; outside of one, native does."""
        return Answering()

    def forget(self) -> None:
        """Verdicts are asked for anew."""
        core.set_policy("native", "always", "accurate")

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[dict[str, Any]]]:
        """A list that holds, after the block, the described calls that it made."""
        rows: list[dict[str, Any]] = []
        core.forget_recorded_calls()
        core.set_recording(True)
        try:
            yield rows
        finally:
            core.set_recording(False)
            rows.extend(json.loads(text) for text, _ in core.recorded_calls())
            core.forget_recorded_calls()

    def without_verdict(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the described calls that the store does not know."""
        store = sessions.session.store
        return [row for row in rows if store.find(row["digest"]) is None]

    def compile(
        self, rows: list[dict[str, Any]], until: float, progress: Callable[[], None]
    ) -> Compiled:
        """Kernels for the described calls, as many as are made before ``until`` (time.time())."""
        done = Compiled(asked=len(rows))
        # A batch holds the locks of all of its keys: others, who want the same clone, are not to
        # wait for lists of tensors to be compiled.
        parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        for row in rows:
            parts[len(json.dumps(row["args"])) > LONG_ARGUMENTS].append(row)
        for part in parts:
            if part and not done.cut:
                self._compile_part(part, done, until, progress)
        if done.cut:
            self.close()
        return done

    def _compile_part(
        self,
        rows: list[dict[str, Any]],
        done: Compiled,
        until: float,
        progress: Callable[[], None],
    ) -> None:
        changed = threading.Condition()
        wanted = len(done.verdicts) + len(rows)

        def answered(digest: str, response: dict[str, Any]) -> None:
            with changed:
                if done.cut:
                    return
                verdict = done.verdicts[digest] = str(response.get("verdict", "failed"))
                if verdict == "failed":
                    done.failures[general(str(response.get("reason", "")))] += 1
                done.seconds += cpu_seconds(response)
                changed.notify()

        service = self._running_service()
        for row in rows:
            service.submit(row, lambda response, digest=row["digest"]: answered(digest, response))
        with changed:
            while len(done.verdicts) < wanted and time.time() < until:
                changed.wait(0.5)
                progress()
            done.cut = len(done.verdicts) < wanted

    def _running_service(self) -> CompileService:
        if self._service is None:
            active = sessions.session
            assert active.store_identity is not None
            store, environment = Path(active.store.root), active.store_identity[1]
            self._service = CompileService(service_settings(store, environment, self.device))
        return self._service

    def close(self) -> None:
        """Ends the compile worker."""
        if self._service is not None:
            self._service.close()
            self._service = None

    def what_answers(self, call: Callable[[], Any], name: str) -> Answer:
        """What answers a call of the operator ``name``; it is made, natively."""
        explainer = core.Explainer()
        with self.answering():
            explainer.start()
            try:
                call()
            except Exception:  # native's own, which was compared
                pass
            finally:
                rows = explainer.stop()
        for row in rows:
            if row["op"] == name:
                return Answer(row["outcome"], row["reason"])
        return Answer("unmet", "native raised, or the call did not reach the hook")

    def facts_of(self, call: Callable[[], Any]) -> list[dict[str, str]]:
        """What the store knows of the kernels for the operators of a call; it is made."""
        with self.recording() as rows, self.answering(), contextlib.suppress(Exception):
            call()
        store = sessions.session.store
        found = [(row["op"], store.find(row["digest"])) for row in rows]
        return [
            {"op": op, **{name: entry["facts"].get(name, "") for name in TOLD}}
            for op, entry in found[:MOST_ENTRIES]
            if entry is not None
        ]

    def why_not_hooked(self, name: str) -> str:
        """The reason for which an overload ("aten::var.correction") is not hooked."""
        op, _, overload = name.partition(".")
        key = "CPU" if self.device == "cpu" else "CUDA"
        return str(core.eligibility(op, overload, key)[2])

    @staticmethod
    def hits() -> dict[str, int]:
        """Calls answered by kernels since the process began, by operator."""
        return {row["op"]: row["hits"] for row in core.operator_stats() if row["hits"]}

    @staticmethod
    def loaded_kernels() -> int:
        """Kernel libraries in this process."""
        return int(core.loaded_kernels())


def service_settings(store: Path, environment: str, device: str) -> ServiceSettings:
    """Of a service with one worker, which proves kernels and does not time them."""
    return ServiceSettings(
        store_root=str(store),
        environment=environment,
        choose="always",
        workers=1,
        slots=1024,
        slots_folder=store.parent / "slots",
        largest_batch=LARGEST_BATCH,
        first_batch=LARGEST_BATCH,
        requests_per_worker=4000,
        request_timeout=150.0,
        idle_timeout=600.0,  # while its kernels are compared
        busy_longest_delay=1.0,
        worker_arguments=("-m", "conformance.untimed_worker"),
        gpu=0 if device == "cuda" else None,  # a child sees one
        memory_bytes=CUDA_WORKER_BYTES if device == "cuda" else 0,
    )


def general(reason: str) -> str:
    """A reason without the numbers that make it another one for each call."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", reason)[:160]
