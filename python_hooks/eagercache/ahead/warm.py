"""Compiling ahead of time what a trace needs: `eagercache.warm_up`, `eagercache warm`.

A plan lists the trace's keys that the store has no verdict on, largest expected gain first. An
executor compiles them: by default a compile service of this process with a worker for every core;
anything with its `submit` and `close` will do, such as the client of a cluster's engine. Every
worker publishes what it made by itself and takes a lock for each key, so that what a killed warm-up
has finished stays, and two of them share the work.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from eagercache.ahead.shards import Shard, ShardError, read_shard
from eagercache.base import config, entry_facts, environment, facts, operators
from eagercache.base.load import core
from eagercache.calls import operator_log, trace
from eagercache.runtime import choices, stores
from eagercache.runtime.session import CUDA_WORKER_BYTES
from eagercache.service import cuda_gate
from eagercache.service.request import expected_gain, tensor_sizes
from eagercache.service.service import CompileService, ServiceSettings, cpu_seconds

# CPU seconds of one bare kernel, proof and timing included, where the store has none to compare;
# and what each element of its arguments adds, in the proof's samples.
USUAL_SECONDS = 2.0
LEAST_SECONDS = 0.2
SECONDS_PER_ELEMENT = 4e-7
USUAL_BYTES = 16 << 10
START_SECONDS = 8.0  # of a worker, torch's import included
# Of native's time that a kernel is expected to save, where nothing is known of the operator.
USUAL_SHARE_SAVED = 0.3
# Of requests that an executor is given at a time, for each worker: so many that kernels are built
# together, few enough for the budget and the order to hold. A larger one goes alone.
SECONDS_UNDER_WAY = 20.0


class WarmError(ValueError):
    """Bad input, or a store that cannot be used: one line with the remedy."""


class Executor(Protocol):
    """Compiles calls, somewhere. `on_done` is called once for each, on any thread."""

    def submit(
        self, description: dict[str, Any], on_done: Callable[[dict[str, Any]], None], /
    ) -> None:
        """Queues one call."""

    def close(self) -> None:
        """Ends at once: what is under way is answered with a failure."""


@dataclass(frozen=True)
class Budget:
    """When to stop. None: no limit."""

    seconds: float | None = None
    bytes: int | None = None

    @staticmethod
    def parse(text: str) -> Budget:
        """Of "120", "120s", "10min", "2h" or "500MB"; raises WarmError."""
        for unit, factor in (("min", 60.0), ("s", 1.0), ("h", 3600.0), ("", 1.0)):
            number = text.removesuffix(unit)
            if unit and number == text:
                continue
            try:
                seconds = float(number) * factor
            except ValueError:
                continue
            if seconds > 0:
                return Budget(seconds=seconds)
        try:
            size = config.parse_size(text) if text[-1:] in "bBgGtT" or text[-2:] == "iB" else 0
        except config.BadValue:
            size = 0
        if size > 0:
            return Budget(bytes=size)
        raise WarmError(f"the budget {text!r} is neither a time (120s, 10min, 2h) nor a size (2GB)")


@dataclass
class Planned:
    """One key of the trace, and what became of it.

    Attributes:
        state: "found" (the store had a verdict), "compiled", "ineligible" (no kernel is ever made
            for such a call), "failed" (its verdict), or "left" (the budget ended before).
        verdict: "kernel", "native" or "failed" where there is one.
        gain_ns: expected before, measured after: what all its calls of the trace save.
    """

    call: trace.TracedCall
    description: dict[str, Any]
    digest: str
    native_ns: float  # of all its calls
    gain_ns: float
    seconds: float  # expected, then spent; of CPU time
    state: str = "left"
    verdict: str = ""
    reason: str = ""
    transient: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "op": self.call.name,
            "dispatch_key": self.description["dispatch_key"],
            "digest": self.digest,
            "calls": self.call.calls,
            "args": self.description["args"],
            "state": self.state,
            "verdict": self.verdict,
            "reason": self.reason,
            "gain_ns": round(self.gain_ns),
            "cpu_seconds": round(self.seconds, 3),
        }


@dataclass
class WarmReport:
    """What a warm-up did, or (of a dry run) would do.

    Attributes:
        entries: every key of the trace, in the order in which they are compiled.
        seconds, bytes: what it took; expected ones of a dry run.
        problems: what of the trace could not be read.
        interrupted: Ctrl-C ended it.
    """

    entries: list[Planned]
    workers: int
    seconds: float = 0.0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    dry_run: bool = False
    interrupted: bool = False

    def count(self, *, state: str = "", verdict: str = "") -> int:
        """Entries of a state and verdict; "" stands for any."""
        return sum(
            state in ("", entry.state) and verdict in ("", entry.verdict) for entry in self.entries
        )

    @property
    def ok(self) -> bool:
        """Whether nothing is left for another run to mend.

        A call that a kernel cannot answer is no failure, and neither is what a budget left out.
        """
        mendable = any(entry.state == "failed" and entry.transient for entry in self.entries)
        return not mendable and not self.interrupted

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dry_run": self.dry_run,
            "seconds": round(self.seconds, 1),
            "bytes": self.bytes,
            "workers": self.workers,
            "entries": [entry.as_dict() for entry in self.entries],
            "problems": self.problems,
            "interrupted": self.interrupted,
            "ok": self.ok,
        }


class Experience:
    """What the store's entries tell about operators: seconds, bytes, and the share saved."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._saved: dict[str, list[float]] = defaultdict(list)
        self._bytes: list[int] = []
        for row in rows:
            self.add(row)
            if row["kind"] == "kernel":
                self._bytes.append(row["bytes"])

    def add(self, manifest: Mapping[str, Any]) -> None:
        """Learns from one more entry."""
        known = manifest["facts"]
        op = known.get("op", "")
        seconds = entry_facts.compile_seconds(known)
        if seconds is not None:
            seconds -= _proof_seconds(_known_call(known))
            self._seconds[op].append(max(LEAST_SECONDS, seconds))
        gain = entry_facts.gain(known) if manifest["kind"] == "kernel" else None
        self._saved[op].append(max(0.0, 1.0 - 1.0 / gain) if gain else 0.0)

    def seconds(self, op: str, arguments: Iterable[Mapping[str, Any]]) -> float:
        """Of CPU time for one more key."""
        known = self._seconds.get(op) or [s for one in self._seconds.values() for s in one]
        usual = sum(known) / len(known) if known else USUAL_SECONDS
        return usual + _proof_seconds(arguments)

    def share_saved(self, op: str) -> float:
        """Of native's time; the usual one counts as one more entry."""
        known = self._saved.get(op, [])
        return (sum(known) + USUAL_SHARE_SAVED) / (len(known) + 1)

    def bytes(self) -> int:
        """Of one kernel on disk."""
        return sum(self._bytes) // len(self._bytes) if self._bytes else USUAL_BYTES


def _known_call(known: Mapping[str, str]) -> list[dict[str, Any]]:
    try:
        return list(json.loads(known.get("call", "{}")).get("args", []))
    except ValueError:  # cut off
        return []


def _proof_seconds(arguments: Iterable[Mapping[str, Any]]) -> float:
    """What the size of a call adds to its compile."""
    elements = sum(math.prod(sizes) for sizes in tensor_sizes(arguments))
    return SECONDS_PER_ELEMENT * elements


def read_traces(
    paths: Sequence[Path], reading: operator_log.Reading
) -> tuple[trace.Trace, set[str]]:
    """The calls of all files (of all in a folder), and the identities of those out of logs."""
    merged = trace.Trace()
    out_of_logs: set[str] = set()
    for path in paths:
        if not path.exists():
            raise WarmError(f"there is no trace {path}; make one with `eagercache record`")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        read = [_read_file(file, path.is_dir(), reading, merged, out_of_logs) for file in files]
        if not any(read):
            raise WarmError(f"there is no trace in {path}; make one with `eagercache record`")
    return merged, out_of_logs


def _read_file(
    file: Path,
    in_folder: bool,
    reading: operator_log.Reading,
    merged: trace.Trace,
    out_of_logs: set[str],
) -> bool:
    """Whether the file, which may be anything where it is in a folder, is a trace."""
    try:
        if not trace.is_trace(file):
            if in_folder:
                return False  # a licence, a page of notes
            raise WarmError(  # noqa: TRY301 - it passes the handlers
                f"{file} is neither a trace of `eagercache record` nor an operator log"
            )
        with file.open("rb") as opened:
            is_log = opened.read(len(trace.LOG_MARK)).decode(errors="replace") == trace.LOG_MARK
        if is_log:
            before = set(merged.calls)
            operator_log.read(file, reading, merged)
            out_of_logs |= set(merged.calls) - before
        else:
            trace.read(file, merged)
    except OSError as error:
        raise WarmError(f"the trace {file} cannot be read: {error.strerror}") from error
    except WarmError:
        raise
    except trace.TraceError as error:
        raise WarmError(str(error)) from error
    except _MALFORMED as error:
        raise WarmError(f"{file} is damaged ({_one_line(error)}); record the trace anew") from error
    return True


def _shard(text: str) -> Shard:
    try:
        return read_shard(text)
    except ShardError as error:
        raise WarmError(str(error)) from error


def _wanted(
    merged: trace.Trace,
    out_of_logs: set[str],
    keys: Sequence[str],
    ops: Any,
    skipped: set[operators.OperatorName],
) -> list[trace.TracedCall]:
    """The calls to compile: of a log only operators that `enable()` hooks, unless named."""
    named = {
        (key, name) for name, key in choices.selected(ops, skipped, list(keys))
    }  # the default operators where none are named
    calls = []
    for identity, call in merged.calls.items():
        name = (call.description["op"], call.description["overload"])
        key = call.description["dispatch_key"]
        if key not in keys or name in skipped:
            continue
        if (key, name) in named or (ops is None and identity not in out_of_logs):
            calls.append(call)
    return calls


def _description(call: trace.TracedCall) -> dict[str, Any]:
    """What the executor is asked with; every GPU is the first one, which is of the same kind."""
    description: dict[str, Any] = json.loads(json.dumps(call.description))
    if description["dispatch_key"] == "CUDA":
        description = cuda_gate.on_first_gpu(description)
    description["calls"] = call.calls
    if call.native_ns is not None:
        description["native_ns"] = call.native_ns
    return description


# What code raises that reads a description of another form than ours.
_MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def _plan(
    calls: Iterable[trace.TracedCall], store: Any, choose: str, experience: Experience
) -> list[Planned]:
    assert core is not None
    entries: dict[str, Planned] = {}
    for call in calls:
        try:
            description = _description(call)
            native_ns = expected_gain(description)
            gain = native_ns * experience.share_saved(call.name)
            seconds = experience.seconds(call.name, description["args"])
            empty = _is_empty(description["args"])
        except _MALFORMED as error:
            raise WarmError(
                f"the trace has a damaged call of {call.name[:100]!r} ({_one_line(error)}); "
                "record the trace anew"
            ) from error
        entry = Planned(call, description, "", native_ns, gain, seconds)
        text = json.dumps({k: description[k] for k in ("state", "args")})
        operator = (description["op"], description["overload"], description["dispatch_key"])
        try:
            if empty:
                raise ValueError("a tensor has no elements")  # noqa: TRY301 - told like the others
            entry.digest = core.call_digest(*operator, text, choose)
        except (ValueError, TypeError, RuntimeError) as error:
            entry.state, entry.reason, entry.seconds = "ineligible", str(error), 0.0
            entries[f"{len(entries)}"] = entry
            continue
        description["digest"] = entry.digest
        if (same := entries.get(entry.digest)) is not None:  # two GPUs of one kind
            same.call = replace(same.call, calls=same.call.calls + call.calls)
            same.native_ns += native_ns
            same.gain_ns += gain
            continue
        entries[entry.digest] = entry
        if (known := store.find(entry.digest)) is not None:
            _take_known(entry, known)
    return sorted(entries.values(), key=lambda entry: -entry.gain_ns)


def _is_empty(arguments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the call steps aside for a tensor without elements."""
    return any(
        0 in argument.get("sizes", ()) or _is_empty(argument.get("elements", ()))
        for argument in arguments
    )


def _take_known(entry: Planned, manifest: Mapping[str, Any]) -> None:
    entry.state, entry.seconds = "found", 0.0
    entry.verdict = manifest["kind"]
    entry.reason = manifest["facts"].get("reason", "")
    _measure_gain(entry, manifest["facts"])


def _measure_gain(entry: Planned, known: Mapping[str, Any]) -> None:
    entry.gain_ns = 0.0
    if entry.verdict == "kernel" and "native_ns" in known and "kernel_ns" in known:
        saved = float(known["native_ns"]) - float(known["kernel_ns"])
        entry.gain_ns = saved * entry.call.calls


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
                _take_known(entry, manifest)
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
        _measure_gain(entry, known)
        if manifest is None or response.get("found"):
            return
        self._experience.add(manifest)
        self.bytes += len(json.dumps(manifest))
        for item in manifest["objects"]:
            if item["digest"] not in self._objects:
                self._objects.add(item["digest"])
                self.bytes += item["size"]


_ASIDE = "steps aside"  # of prove.capture


def _no_progress(_: Run) -> None:
    return None


def warm_up(
    *traces: str | os.PathLike[str],
    device: str | None = None,
    budget: str | float | Budget | None = None,
    dry_run: bool = False,
    ops: Any = None,
    skip: Iterable[Any] = (),
    choose: config.Choose = "faster",
    numerics: config.Numerics = "accurate",
    scale: int = 1,
    workers: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: Progress = _no_progress,
    shard: str | None = None,
) -> WarmReport:
    """Compiles into the store what traces need, largest expected gain first.

    Args:
        traces: files of `record()`, operator logs, or folders of either.
        device: "cpu" or "cuda"; by default the calls of both that this machine can compile, and
            operator logs are taken to be the CPU's.
        budget: seconds, or "120s", "10min", "2h", "2GB"; what does not fit in is left.
        dry_run: only says what would be done, and what it would take.
        ops: as of `enable()`; by default every recorded call, and of operator logs those of the
            default operators.
        skip: operators to leave out.
        choose: as of `enable()`, and part of what the store keeps.
        numerics: as of `enable()`.
        scale: the batch dimension of calls out of operator logs is divided by it.
        workers: processes that compile; all cores by default.
        cache_dir: the store; EAGERCACHE_DIR or a directory of the user's by default.
        executor: compiles in the place of processes of this machine; see `Executor`.
        progress: called a few times a second.
        shard: "INDEX/COUNT": only this part of the keys, for one of several machines. "auto": as a
            job array's task is told.

    Returns:
        What was compiled, what native keeps, what failed and why. Doing it again compiles nothing
        twice, and so does going on after a warm-up that was killed.

    Raises:
        WarmError: a trace or an argument that cannot be used; the message is one line.
    """
    began = time.monotonic()
    if core is None:
        raise WarmError("eagercache works on Linux x86-64 only")
    limits = _budget_of(budget)
    settings = config.read_settings()
    keys = _keys(device)
    reading = operator_log.Reading("cuda:0" if device == "cuda" else "cpu", max(1, int(scale)))
    merged, out_of_logs = read_traces([Path(path) for path in traces], reading)
    try:
        calls = _wanted(merged, out_of_logs, keys, ops, choices.skipped(settings, skip))
        chosen = choices.configuration(settings, "native", choose, numerics)
    except ValueError as error:
        raise WarmError(str(error)) from error
    store, text = _open_store(settings, cache_dir)
    experience = Experience(store.entries())
    entries = _plan(calls, store, chosen.choose, experience)
    if shard is not None:
        part = _shard(shard)
        entries = [entry for entry in entries if part.has(entry.digest)]
    workers = workers or settings.workers or len(os.sched_getaffinity(0))
    report = WarmReport(entries, workers, problems=merged.problems, dry_run=dry_run)
    todo = [entry for entry in entries if entry.state == "left"]
    if dry_run:
        report.seconds = sum(entry.seconds for entry in todo) / workers
        report.seconds += START_SECONDS if todo else 0.0
        report.bytes = len(todo) * experience.bytes()
        return report
    if todo:
        if executor is None:
            executor = _service(settings, store.root, text, chosen, workers, keys)
        run = Run(todo, store, experience, executor, limits, workers, began)
        try:
            run.run(progress)
        except KeyboardInterrupt:
            report.interrupted = True
        report.bytes = run.bytes
    for entry in entries:
        if entry.state == "left":
            entry.seconds = 0.0
    report.seconds = time.monotonic() - began
    return report


def _budget_of(budget: str | float | Budget | None) -> Budget:
    if isinstance(budget, Budget):
        return budget
    if budget is None:
        return Budget()
    return Budget.parse(str(budget))


def _keys(device: str | None) -> list[str]:
    try:
        keys = choices.dispatch_keys(device)
    except ValueError as error:
        raise WarmError(str(error)) from error
    if device == "cuda":
        assert core is not None
        if not core.has_cuda_driver():
            raise WarmError(
                "this machine has no CUDA driver; warm with --device cuda on one that has"
            )
    return keys


def _open_store(
    settings: config.Settings, cache_dir: str | os.PathLike[str] | None
) -> tuple[Any, str]:
    assert core is not None
    paths = stores.store_paths(settings, cache_dir)
    remembered = facts.Facts(paths[0])
    text = environment.environment_text(cxx=settings.cxx, facts=remembered)
    store, path, problems = stores.first_usable_store(settings, paths, text, read_only=False)
    if store is not None:
        if path == paths[0]:
            remembered.save()
        return store, text
    raise WarmError(
        f"no store can be used ({'; '.join(problems)}); name one of your own with --dir"
    )


def _service(
    settings: config.Settings,
    root: str,
    text: str,
    chosen: Any,
    workers: int,
    keys: Sequence[str],
) -> CompileService:
    cuda: dict[str, Any] = {}
    if "CUDA" in keys:
        cuda = {"gpu": 0, "memory_bytes": CUDA_WORKER_BYTES}
    return CompileService(
        ServiceSettings(
            store_root=root,
            environment=text,
            choose=chosen.choose,
            numerics=chosen.numerics,
            workers=workers,
            slots=max(workers, settings.slots),
            cxx=settings.cxx,
            max_bytes=settings.max_bytes,
            allow_untrusted=settings.allow_untrusted,
            revoked=settings.revoked_text,
            **cuda,
        )
    )
