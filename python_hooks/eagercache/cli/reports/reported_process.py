"""What a process of `eagercache run --report` says of itself when it ends."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from eagercache.base.entry_facts import number
from eagercache.calls.texts import NOT_YET
from eagercache.cli.reports.class_times import kernel_of_class, kernels_of_classes
from eagercache.version import __version__

if TYPE_CHECKING:
    from eagercache.cli.reports.timeline import Timeline
    from eagercache.frontend.report import KernelInfo


def process_report(
    wall_seconds: float, timeline: Timeline | None = None, *, at_end: bool = True
) -> dict[str, Any]:
    """What this process did, for `Report.of`. Calls must have been recorded."""
    from eagercache.base.load import core
    from eagercache.frontend import report
    from eagercache.frontend.gains import Unfinished
    from eagercache.runtime import differences
    from eagercache.runtime.session import session

    assert core is not None
    stats, unfinished = report.stats(), Unfinished.now()
    services = session.services()
    verdicts = {info.digest: info for info in report.kernels()}
    answers = [answer for service in services for answer in service.answers()]
    seen: dict[str, Any] = {}
    if timeline is not None:
        seen = timeline.ended(answers) if at_end else timeline.so_far(answers)
    return {
        "pid": os.getpid(),
        "command": sys.argv[:3],
        "wall_seconds": wall_seconds,
        "calls": list(_calls(verdicts, unfinished.digests)),
        "unfinished": [[*name, count] for name, count in unfinished.operators.items()],
        "aside": {name: row.aside for name, row in stats.operators.items() if row.aside},
        "aside_reasons": dict(
            sum((Counter(row.aside_reasons) for row in stats.operators.values()), Counter())
        ),
        "asides": core.recorded_asides(),
        "modules": {name: asdict(row) for name, row in stats.modules.items()},
        "not_yet": stats.not_yet,
        "compiles": stats.compiles,
        "failures": stats.failures,
        "compile_seconds": sum(service.seconds for service in services),
        "differences": differences.found(),
        "timeline": seen,
        "environment": _environment(),
    }


def _calls(verdicts: dict[str, KernelInfo], cut_off: set[str]) -> Iterable[dict[str, Any]]:
    """A row for each key that was called."""
    from eagercache.base.load import core
    from eagercache.base.operators import described_name

    assert core is not None
    classes = kernels_of_classes(verdicts.values())
    for text, hits in core.recorded_calls():
        row = json.loads(text)
        known = verdicts.get(row["digest"]) if row["digest"] not in cut_off else None
        if known is None and hits and (classed := kernel_of_class(row, classes)):
            info, *times = classed
            known = replace(info, native_ns=times[0], kernel_ns=times[1], facts={})
        kernel_ns = known.kernel_ns if known else None
        # A gain is of times that were measured together: those of a program's few first native
        # calls, cold or on a busy machine, are others.
        stored, seen = known.native_ns if known else None, row.get("native_ns")
        native_ns = stored or seen if kernel_ns is not None else seen or stored
        yield {
            "op": described_name(row),
            "dispatch_key": row["dispatch_key"],
            "calls": row["calls"],
            "hits": hits,
            "native_ns": native_ns,
            "kernel_ns": kernel_ns,
            "decision": NOT_YET if row["digest"] in cut_off else known.decision if known else "",
            "reason": known.reason if known else "",
            **(_moved(known) if known and hits else {}),
        }


def _moved(known: KernelInfo) -> dict[str, float]:
    """What the kernel moves and how fast; nothing of small calls, which caches answer."""
    moved, speed = number(known.facts, "bytes"), known.gigabytes_per_second
    copy = number(known.facts, "copy_gbps")
    return {"bytes": moved, "gbps": speed, "copy_gbps": copy} if moved and speed and copy else {}


def _environment() -> dict[str, Any]:
    import torch

    gpus = torch.cuda.is_initialized()
    return {
        "eagercache": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "GPU": torch.cuda.get_device_name() if gpus else "none used",
    }


def process_counters() -> dict[str, Any]:
    """What this process did in a few numbers, for `eagercache compare`: no call was recorded."""
    from eagercache.frontend import report

    stats = report.stats()
    return {
        "hits": stats.hits + stats.module_hits,
        "compiles": stats.compiles,
        "failures": stats.failures,
        "not_yet": stats.not_yet,
    }
