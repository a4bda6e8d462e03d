"""Compiling ahead of time what a trace needs: `eagercache.warm_up`, `eagercache warm`.

A plan lists the trace's keys that the store has no verdict on, largest expected gain first. An
executor compiles them: by default a compile service of this process with a worker for every core;
anything with its `submit` and `close` will do, such as the client of a cluster's engine. Every
worker publishes what it made by itself and takes a lock for each key, so that what a killed warm-up
has finished stays, and two of them share the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eagercache.ahead.budget import Budget, budget_of
from eagercache.ahead.engines import local_workers, open_engine
from eagercache.ahead.errors import WarmError
from eagercache.ahead.experience import Experience
from eagercache.ahead.machine import compile_service, open_store
from eagercache.ahead.plan import plan_calls
from eagercache.ahead.report import Planned, WarmReport
from eagercache.ahead.run import START_SECONDS, Executor, Progress, Run
from eagercache.ahead.shards import ShardError, read_shard
from eagercache.ahead.traces import read_traces, wanted_calls
from eagercache.base import config
from eagercache.base.load import core, usable, why_unavailable
from eagercache.calls.log_descriptions import Reading
from eagercache.runtime import choices


def _of_shard(entries: list[Planned], text: str | None) -> list[Planned]:
    """The entries that are in a shard; all of them for None."""
    if text is None:
        return entries
    try:
        shard = read_shard(text)
    except ShardError as error:
        raise WarmError(str(error)) from error
    return [entry for entry in entries if shard.has(entry.digest)]


def _no_progress(_: Run) -> None:
    return None


def warm_up(
    *traces: str | os.PathLike[str],
    device: config.Device | None = None,
    budget: str | float | Budget | None = None,
    dry_run: bool = False,
    ops: Any = None,
    skip: Iterable[Any] = (),
    choose: config.Choose = "faster",
    numerics: config.Numerics = "accurate",
    search: config.Search | None = None,
    scale: int = 1,
    workers: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: Progress = _no_progress,
    shard: str | None = None,
    on: str | None = None,
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
        search: how far other forms of a CUDA kernel are looked for; EAGERCACHE_SEARCH by default.
            "deep" also takes up kernels of the store of which none were looked for.
        scale: the batch dimension of calls out of operator logs is divided by it.
        workers: processes that compile; all cores by default.
        cache_dir: the store; EAGERCACHE_DIR or a directory of the user's by default.
        executor: compiles in the place of processes of this machine; see `Executor`.
        progress: called a few times a second.
        shard: "INDEX/COUNT": only this part of the keys, for one of several machines. "auto": as a
            job array's task is told.
        on: where it is compiled: "local:8" (this machine, as ``workers``), "dask://HOST:PORT",
            "ray://HOST:PORT" or "ray://auto". Machines of a cluster are of this one's kind; what
            they compile is published in this store, and in their own.

    Returns:
        What was compiled, what native keeps, what failed and why. Doing it again compiles nothing
        twice, and so does going on after a warm-up that was killed.

    Raises:
        WarmError: a trace or an argument that cannot be used; the message is one line.
    """
    began = time.monotonic()
    if not usable():
        raise WarmError(why_unavailable())
    limits = budget_of(budget)
    settings = config.read_settings()
    keys = _keys(device)
    reading = Reading("cuda:0" if device == "cuda" else "cpu", max(1, int(scale)))
    merged, out_of_logs = read_traces([Path(path) for path in traces], reading)
    try:
        calls = wanted_calls(merged, out_of_logs, keys, ops, choices.skipped(settings, skip))
        chosen = choices.configuration(settings, "native", choose, numerics)
    except ValueError as error:
        raise WarmError(str(error)) from error
    given = (local_workers(on) if on is not None else None) or workers
    store, text = open_store(settings, cache_dir)
    experience = Experience(store.entries())
    search = search or settings.search
    entries = plan_calls(calls, store, chosen.choose, experience, search == "deep")
    entries = _of_shard(entries, shard)
    workers = given or settings.workers or len(os.sched_getaffinity(0))
    report = WarmReport(entries, workers, problems=merged.problems, dry_run=dry_run)
    todo = [entry for entry in entries if entry.state == "left"]
    if dry_run:
        return _foretold(report, todo, experience)
    if todo:
        asked: dict[str, Any] = {"choose": chosen.choose, "numerics": chosen.numerics}
        asked |= {"search": search, "keys": tuple(keys)}
        if executor is None and on is not None and local_workers(on) is None:
            executor = _cluster(on, store, text, given, report, **asked)
        elif executor is None:
            executor = compile_service(settings, store.root, text, workers=workers, **asked)
        run = Run(todo, store, experience, executor, limits, report.workers, began)
        try:
            run.run(progress)
        except KeyboardInterrupt:
            report.interrupted = True
        _take_counts(executor, run, report)
    for entry in todo:
        if entry.state == "left":
            entry.seconds = 0.0
    report.seconds = time.monotonic() - began
    return report


def _cluster(
    on: str, store: Any, text: str, most: int, report: WarmReport, **asked: Any
) -> Executor:
    """An executor on a cluster, of ``most`` workers at a time where that is not 0."""
    from eagercache.ahead.cluster import ClusterExecutor

    engine = open_engine(on, gpu="CUDA" in asked["keys"])
    engine.workers = min(engine.workers, most or engine.workers)
    report.workers = engine.workers
    return ClusterExecutor(engine, store, text, **asked)


def _foretold(report: WarmReport, todo: Sequence[Planned], experience: Experience) -> WarmReport:
    """The report, with what ``todo`` would take."""
    report.seconds = sum(entry.seconds for entry in todo) / report.workers
    report.seconds += START_SECONDS if todo else 0.0
    report.bytes = len(todo) * experience.bytes()
    return report


def _take_counts(executor: Executor, run: Run, report: WarmReport) -> None:
    report.bytes = run.bytes
    counts = getattr(executor, "counts", None)
    if counts is not None:
        report.machines, report.lost = dict(counts.machines), counts.lost
        report.refused = dict(counts.refused)


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
