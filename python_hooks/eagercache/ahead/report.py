"""Each key of a warm-up, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagercache.calls import trace


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
        machines: of a warm-up on a cluster, how many batches each machine answered.
        lost: batches whose machine was lost; they were tried again.
        refused: what came from machines and was not taken, by reason.
    """

    entries: list[Planned]
    workers: int
    seconds: float = 0.0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    dry_run: bool = False
    interrupted: bool = False
    machines: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)

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
            "machines": self.machines,
            "lost": self.lost,
            "refused": self.refused,
            "ok": self.ok,
        }
