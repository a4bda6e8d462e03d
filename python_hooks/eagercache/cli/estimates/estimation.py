"""What kernels would save a program, from its native calls and from gains that were measured.

Every bound is of what `usual_gains.json` holds: measurements of single operators and of whole
models on a CPU, made by bench/usual_gains.py. What it does not know counts as no gain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("usual_gains.json")
# A call that takes so many times as long as the longest one that was measured may gain nothing.
_FURTHEST = 4.0


@dataclass
class Saved:
    """Seconds: at least, as measured most often, and at most."""

    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    def add(self, other: Saved, times: float = 1.0) -> None:
        """Adds ``times`` as much as another."""
        self.low += times * other.low
        self.middle += times * other.middle
        self.high += times * other.high


@dataclass
class Part:
    """An operator, or a class of modules that no other module calls.

    Attributes:
        name: the operator's full name, or the module's class.
        calls: how many there were.
        seconds: what they took natively; of modules with gradients with their share of the
            backward pass.
        saved: what kernels would save of that.
        known: whether anything was measured of such calls.
        untimed: calls whose time is not known, such as those on a GPU. They count as no gain.
    """

    name: str
    calls: int = 0
    seconds: float = 0.0
    saved: Saved = field(default_factory=Saved)
    known: bool = True
    untimed: int = 0


@dataclass
class Estimate:
    """What became of all processes of a program together.

    Attributes:
        wall_seconds: of all processes, added.
        operators: what `enable()` hooks, those that take longest first.
        modules: outermost modules, whose whole calls `enable(modules="auto")` may answer.
        sources: where the gains come from: files, with the commits that were measured.
    """

    processes: int
    wall_seconds: float
    operators: list[Part]
    modules: list[Part]
    sources: list[str]

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]], table: Mapping[str, Any]) -> Estimate:
        """Of what the processes said (estimated_process.py)."""
        sources = [table["operators of"], *table["modules"].values()]
        return Estimate(
            processes=len(parts),
            wall_seconds=sum(part["wall_seconds"] for part in parts),
            operators=_operators(parts, table["operators"]),
            modules=_modules(parts, table["modules"]),
            sources=[f"{source['source']} at {source['commit']}" for source in sources],
        )

    @staticmethod
    def read(folder: Path) -> Estimate:
        """Of the files that the processes left, and the table that comes with the package."""
        parts = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        return Estimate.of(parts, json.loads(TABLE.read_text()))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; shares are of `wall_seconds`."""
        return {
            **asdict(self),
            "shares": {
                "operators": self.shares(self.operators),
                "modules": self.shares(self.modules),
            },
        }

    def shares(self, parts: Sequence[Part]) -> dict[str, float]:
        """Of the program's time: what ``parts`` take, what of it is known, and what is saved."""
        saved = Saved()
        for part in parts:
            saved.add(part.saved)
        whole = self.wall_seconds or 1.0
        return {
            "time": sum(part.seconds for part in parts) / whole,
            "known": sum(part.seconds for part in parts if part.known) / whole,
            **{name: value / whole for name, value in asdict(saved).items()},
        }


def saved_of_call(rows: Sequence[Sequence[float]], native_us: float) -> Saved:
    """What a call saves, in microseconds, which natively takes ``native_us``.

    ``rows`` are the operator's in the table. The next shorter and the next longer call that was
    measured bound it, with their intervals; the one nearer to it is the middle. A kernel that would
    lose is not used, so that nothing is below 0.
    """
    shorter = [row for row in rows if row[0] <= native_us][-1:]
    longer = [row for row in rows if row[0] > native_us][:1]
    beside = [*shorter, *longer]
    if not beside:
        return Saved()
    nearest = min(beside, key=lambda row: max(row[0] / native_us, native_us / row[0]))
    far = not longer and native_us > _FURTHEST * shorter[0][0]
    return Saved(
        low=0.0 if far else max(0.0, native_us * (1 - max(row[3] for row in beside))),
        middle=max(0.0, native_us * (1 - nearest[1])),
        high=max(0.0, native_us * (1 - min(row[2] for row in beside))),
    )


def _operators(
    parts: Sequence[Mapping[str, Any]], table: Mapping[str, Sequence[Sequence[float]]]
) -> list[Part]:
    found: dict[str, Part] = {}
    for call in (call for part in parts for call in part["calls"]):
        on_cpu = call["dispatch_key"] == "CPU"
        name = call["op"] if on_cpu else f"{call['op']} @{call['dispatch_key']}"
        one = found.setdefault(name, Part(name, known=on_cpu and name in table))
        one.calls += call["calls"]
        if not call["native_ns"]:
            one.untimed += call["calls"]
            continue
        native_us = call["native_ns"] / 1e3
        one.seconds += call["calls"] * native_us / 1e6
        if one.known:
            one.saved.add(saved_of_call(table[name], native_us), call["calls"] / 1e6)
    return sorted(found.values(), key=lambda part: (-part.seconds, -part.calls, part.name))


def _modules(
    parts: Sequence[Mapping[str, Any]], table: Mapping[str, Mapping[str, float]]
) -> list[Part]:
    found: dict[tuple[str, bool], Part] = {}
    for process in parts:
        trained = sum(row["seconds"] for row in process["modules"] if row["gradients"])
        for row in process["modules"]:
            kind = "training" if row["gradients"] else "inference"
            seconds = row["seconds"]
            if row["gradients"] and trained:
                seconds += process["backward_seconds"] * row["seconds"] / trained
            ratios = table[kind]
            name = row["name"] + (" (training)" if row["gradients"] else "")
            one = found.setdefault((row["name"], row["gradients"]), Part(name))
            one.calls += row["calls"]
            one.seconds += seconds
            one.saved.add(
                Saved(*(1 - 1 / ratios[bound] for bound in ("low", "middle", "high"))), seconds
            )
    return sorted(found.values(), key=lambda part: (-part.seconds, part.name))
