"""The counters of `stats()` in Prometheus' text format, as a text and in a file.

The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagercache.base.warn import warn_once
from eagercache.frontend.report import Stats, stats

# How often a file is written: `stats()` of thousands of keys takes tenths of a second.
INTERVAL_SECONDS = 60.0

_Labels = dict[str, str]
_Sample = tuple[_Labels, float]


def metrics() -> str:
    """The counters of this process in Prometheus' text format; see `stats` for what they count.

    For a server of one's own: its content type is ``text/plain; version=0.0.4``. Programs that are
    scraped by the node exporter set EAGERCACHE_METRICS to a file of its textfile collector.
    """
    return text_of(stats())


def text_of(counted: Stats) -> str:
    """The text of given counters."""
    lines = []
    for name, kind, said, samples in _families(counted):
        full = f"eagercache_{name}"
        rows = [f"{full}{_labels(labels)} {_number(value)}" for labels, value in samples]
        if rows:
            lines += [f"# HELP {full} {said}", f"# TYPE {full} {kind}", *rows]
    return "\n".join(lines) + "\n"


def _families(counted: Stats) -> Iterator[tuple[str, str, str, list[_Sample]]]:
    """Each with its name, type, help and samples."""
    operators = counted.operators.values()
    yield (
        *("calls_total", "counter", "Calls of hooked operators, by what answered them."),
        [
            ({"op": row.op, "key": row.dispatch_key, "outcome": outcome}, getattr(row, field))
            for row in operators
            for outcome, field in _OUTCOMES.items()
            if getattr(row, field)
        ],
    )
    yield (
        *("aside_total", "counter", "Calls that no kernel may answer, by the rule that says so."),
        [
            ({"op": row.op, "key": row.dispatch_key, "reason": reason}, count)
            for row in operators
            for reason, count in row.aside_reasons.items()
            if count
        ],
    )
    yield (
        *("module_calls_total", "counter", "Calls of whole modules that kernels answered."),
        [({"module": name}, row.hits) for name, row in counted.modules.items() if row.hits],
    )
    for name, kind, said, value in (
        ("compiles_total", "counter", "Kernels that were compiled.", counted.compiles),
        ("failures_total", "counter", "Compiles that ended without a verdict.", counted.failures),
        ("outstanding", "gauge", "Keys on their way to a verdict.", counted.outstanding),
        ("loaded_kernels", "gauge", "Kernel libraries in the process.", counted.loaded),
        ("saved_seconds_total", "counter", "Seconds saved, an estimate.", counted.seconds_saved),
        ("lost_seconds_total", "counter", "Seconds lost, an estimate.", counted.seconds_lost),
    ):
        yield name, kind, said, [({}, value)]
    remote = counted.remote
    asked = {"hit": remote.hits, "miss": remote.misses, "error": remote.errors}
    yield (
        *("remote_lookups_total", "counter", "Keys that remotes were asked for."),
        [({"outcome": outcome}, count) for outcome, count in asked.items()],
    )
    yield (
        *("remote_refused_total", "counter", "Entries of remotes that were not used."),
        [({"kind": kind}, count) for kind, count in remote.refused.items()],
    )
    for name, said, value in (
        ("remote_untried_total", "Hits that had to be tried here first.", remote.untried),
        ("remote_sent_total", "Entries that remotes got.", remote.sent),
        ("remote_requests_total", "Requests to remotes.", remote.requests),
        ("remote_request_seconds_total", "Seconds of those requests.", remote.request_seconds),
    ):
        yield name, "counter", said, [({}, value)]
    moved = {"read": remote.bytes_read, "sent": remote.bytes_sent}
    yield (
        *("remote_bytes_total", "counter", "Bytes of entries, objects and lists."),
        [({"direction": direction}, count) for direction, count in moved.items()],
    )


_OUTCOMES = {
    "kernel": "hits",
    "miss": "misses",
    "pending": "pending",
    "native": "native",
    "aside": "aside",
}


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _labels(labels: _Labels) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


class MetricsCollector:
    """The counters as prometheus_client's registries take them: `registry.register(...)`.

    For programs that serve metrics of their own with that package: ours are in the same answer.
    Raises ImportError where it is not installed.
    """

    def __init__(self) -> None:
        from prometheus_client import core

        self._kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}

    def collect(self) -> Iterator[Any]:
        """One family after the other; called by a registry, on its thread."""
        for name, kind, said, samples in _families(stats()):
            if samples:
                labels = list(samples[0][0])
                family = self._kinds[kind](f"eagercache_{name}", said, labels=labels)
                for row, value in samples:
                    family.add_metric([row[label] for label in labels], value)
                yield family


class MetricsFile:
    """Writes the counters into a file, now and then and at the end. Readers see all or nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._path: Path | None = None
        self._of_process = 0
        self._ended = threading.Event()

    def start(self, path: Path) -> None:
        """Writes into ``path`` from now on, in which `{pid}` is the process's number."""
        with self._lock:
            running = self._of_process == os.getpid()
            self._path = Path(str(path).replace("{pid}", str(os.getpid())))
            if running:
                return
            self._of_process = os.getpid()
            self._ended = threading.Event()
            with contextlib.suppress(RuntimeError):  # no more threads: it is written at the end
                threading.Thread(
                    target=self._serve, args=(self._ended,), name="eagercache-metrics", daemon=True
                ).start()

    def end(self) -> None:
        """Writes a last time."""
        with self._lock:
            started = self._path is not None and self._of_process == os.getpid()
            self._ended.set()
        if started:
            self._write()

    def _serve(self, ended: threading.Event) -> None:
        while not ended.wait(INTERVAL_SECONDS):
            self._write()

    def _write(self) -> None:
        path = self._path
        assert path is not None
        text = metrics()
        temporary: str | None = None
        try:
            _require_no_device(path)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with os.fdopen(handle, "w") as file:
                os.fchmod(handle, 0o644)  # the collector is another user
                file.write(text)
            Path(temporary).replace(path)
        except OSError as error:
            warn_once(
                f"metrics:{path}",
                f"EAGERCACHE_METRICS={path} cannot be written: {error}; name a file in a folder "
                "that this program may write.",
            )
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()


def _require_no_device(path: Path) -> None:
    """Raises OSError for what is there and is no file: one would take its place, as /dev/null's."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")


metrics_file = MetricsFile()
