"""`eagercache warm` without a trace: what was being compiled when programs ended."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from eagercache.base import config
from eagercache.calls.texts import counted
from eagercache.cli.common import Unusable, environment_text, open_store, table
from eagercache.service import lingering
from eagercache.service.cuda_gate import bytes_wanted
from eagercache.service.gpu_watch import use_of
from eagercache.service.pending import PendingFolder, PendingRequest
from eagercache.service.pending_work import Outcome, PendingWork
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings, for_gpu


@dataclass
class PendingReport:
    """What was done, or of a dry run what there is to do."""

    store: str
    dry_run: bool
    left: int = 0  # requests of this environment
    elsewhere: int = 0  # those of others
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is left for another run to mend."""
        return not self.interrupted and not any(one.transient for one in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "outcomes": [vars(one) for one in self.outcomes], "ok": self.ok}

    def show(self) -> None:
        """For people."""
        if self.outcomes:
            table(
                "what was done",
                [("operator", ""), ("result", ""), ("why", "")],
                [(one.name, one.verdict, one.reason) for one in self.outcomes],
            )
        verdicts = Counter(one.verdict for one in self.outcomes)
        if self.dry_run:
            click.echo(f"{counted(self.left, 'request')} of programs that have ended")
        elif not self.outcomes and not self.left:
            click.echo(f"no program left anything to be compiled in {self.store}")
        else:
            click.echo(
                f"{counted(verdicts['kernel'], 'kernel')} compiled, {verdicts['native']} that "
                f"native keeps, {verdicts['failed']} failed, {self.left} left; "
                f"{self.seconds:.0f} s" + ("; interrupted" if self.interrupted else "")
            )
        if self.elsewhere:
            click.echo(
                f"{counted(self.elsewhere, 'request')} of other environments: only the Python, "
                "torch and compiler that left them can go on with them"
            )


def compile_pending(
    directory: Path | None,
    workers: int,
    seconds: float | None,
    dry_run: bool,
    progress: Callable[[PendingWork], None],
) -> PendingReport:
    """Goes through the pending requests of this environment, until ``seconds`` are over."""
    store = open_store(directory, read_only=dry_run)
    folder, text = PendingFolder(store.root), environment_text()
    report = PendingReport(store.root, dry_run)
    here, all_of_them = folder.count(text)
    report.elsewhere = all_of_them - here
    if dry_run or here == 0:
        report.left = here
        return report
    lock = _take_over(folder)
    work = PendingWork(folder, text, store, lambda gpu: _service(store.root, text, workers, gpu))
    began = time.monotonic()

    def over() -> bool:
        progress(work)
        return seconds is not None and time.monotonic() - began >= seconds

    try:
        work.run(_for_one_device, over)
        progress(work)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        work.close(asked=True)
        os.close(lock)
    report.outcomes, report.seconds = work.outcomes, round(time.monotonic() - began, 1)
    report.left = folder.count(text)[0]
    return report


def _take_over(folder: PendingFolder) -> int:
    """The lock, from a lingering process, which ends."""
    if not folder.usable():
        raise Unusable(f"{folder.path} may be read or written by other users, so it is not used")
    lingering.stop(folder.path.parent)
    lock = lingering.take_lock(folder.path)
    if lock is None:
        raise Unusable(f"another process goes on with what is in {folder.path}")
    return lock


def _for_one_device(left: list[PendingRequest]) -> list[PendingRequest]:
    """All that is for the first one's device, and has room on it; who asks knows who else is there.

    Nothing where no device has room.
    """
    for gpu in dict.fromkeys(one.gpu for one in left):
        use = use_of(gpu) if gpu else None
        fitting = [
            one
            for one in left
            if one.gpu == gpu
            and (not gpu or (use is not None and use.free_bytes >= bytes_wanted(one.description)))
        ]
        if fitting:
            return fitting
    return []


def _service(root: str, text: str, workers: int, gpu: str) -> CompileService:
    settings = config.read_settings()
    workers = workers or settings.workers or len(os.sched_getaffinity(0))
    for_cpu = ServiceSettings(
        store_root=root,
        environment=text,
        workers=1 if gpu else workers,  # kernels are timed on it
        slots=max(workers, settings.slots),
        cxx=settings.cxx,
        awaited=True,
        max_bytes=settings.max_bytes,
        revoked=settings.revoked_text,
    )
    return CompileService(for_gpu(for_cpu, 0, gpu) if gpu else for_cpu)
