"""What runs of a program, native and with kernels by turns, say together. No run is made here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagercache.calls.texts import counted
from eagercache.cli.compared_output import OutputComparison, compare_outputs
from eagercache.cli.measured_process import Run
from eagercache.cli.progress_bars import times_of_steps

# Of Student's t with 1, 2, ... degrees of freedom: 95 of 100 cases are within.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_MANY = 1.96

# A program that prints fewer lines, or all of them in a smaller share of its native time, does not
# show how far it is.
_FEWEST_MARKS = 5
_SHORTEST_SPREAD = 0.2
# Of progress bars so many places are compared.
_BAR_MARKS = 40


@dataclass(frozen=True)
class Spread:
    """Values of one kind: median, least, largest, how many."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Ratio:
    """How many times as fast; ``low`` and ``high`` hold the true ratio in 95 of 100 cases.

    They are those of the mean of the pairs' logarithms. Of one pair nothing is known, and they are
    0 and infinity.
    """

    value: float
    low: float
    high: float

    @staticmethod
    def of_pairs(pairs: Sequence[tuple[float, float]]) -> Ratio:
        """Of (native, with kernels) in seconds, measured one after the other."""
        logs = [math.log(native / kernels) for native, kernels in pairs]
        mean = statistics.fmean(logs)
        if len(logs) < 2:
            return Ratio(math.exp(mean), 0.0, math.inf)
        freedom = len(logs) - 1
        student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _MANY
        half = student * statistics.stdev(logs) / math.sqrt(len(logs))
        return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    @property
    def sign(self) -> int:
        """1 where kernels are faster, -1 where they are slower, 0 where neither is sure."""
        return 1 if self.low > 1.0 else -1 if self.high < 1.0 else 0


@dataclass(frozen=True)
class Progress:
    """How a process with kernels went on beside a native one, by when both were equally far.

    That is seen by the lines that they print, or else by the progress bars.

    Attributes:
        lost: seconds that it was behind at most.
        turn: its age when it was furthest behind: from there on it gained.
        even: its age from which on it was never behind; None where it ended behind.
    """

    lost: float
    turn: float
    even: float | None


def progress_of(natives: Sequence[Run], kernels: Sequence[Run]) -> Progress | None:
    """Of medians of the runs; None where the program does not show how far it is."""
    rows = _marks(natives, kernels)
    if not rows:
        return None
    native = [statistics.median(row) for row in zip(*rows[: len(natives)], strict=True)]
    other = [statistics.median(row) for row in zip(*rows[len(natives) :], strict=True)]
    seconds = statistics.median(run.seconds for run in natives)
    native.append(seconds)
    other.append(statistics.median(run.seconds for run in kernels))
    behind = [mine - theirs for mine, theirs in zip(other, native, strict=True)]
    worst = max(range(len(behind)), key=lambda index: (behind[index], index))
    last_behind = max((i for i, value in enumerate(behind) if value > 0), default=-1)
    even = other[last_behind + 1] if last_behind + 1 < len(other) else None
    return Progress(max(0.0, behind[worst]), other[worst], even)


def _marks(natives: Sequence[Run], kernels: Sequence[Run]) -> list[list[float]]:
    """For each run when it was at the same places; [] where no run shows that."""
    runs = (*natives, *kernels)
    of_lines = [run.times for run in runs]
    of_bars = times_of_steps([run.steps for run in runs], _BAR_MARKS)
    for rows in (of_lines, of_bars):
        if not rows or len({len(row) for row in rows}) != 1 or len(rows[0]) < _FEWEST_MARKS:
            continue
        spread = statistics.median(row[-1] - row[0] for row in rows[: len(natives)])
        if spread >= _SHORTEST_SPREAD * statistics.median(run.seconds for run in natives):
            return rows
    return []


@dataclass
class Comparison:
    """All runs of one comparison, in the order in which they were made on each side.

    Attributes:
        first_native: the run before all others, which found files on a cold disk; it is in no time.
        cold: the first process with kernels.
        pairs: (native, with kernels), one after the other.
        fresh: whether the first process with kernels found an empty cache.
    """

    first_native: Run
    cold: Run
    pairs: list[tuple[Run, Run]] = field(default_factory=list)
    fresh: bool = False

    @property
    def natives(self) -> list[Run]:
        """The native runs of the pairs."""
        return [native for native, _ in self.pairs]

    @property
    def warm(self) -> list[Run]:
        """The runs with kernels from the second process on."""
        return [kernels for _, kernels in self.pairs]

    def ratio(self) -> Ratio:
        """Native's time over that with kernels, from the second process on."""
        return Ratio.of_pairs([(native.seconds, kernels.seconds) for native, kernels in self.pairs])

    def native_seconds(self) -> Spread:
        """Of the pairs."""
        return Spread.of([run.seconds for run in self.natives])

    def warm_seconds(self) -> Spread:
        """Of the pairs."""
        return Spread.of([run.seconds for run in self.warm])

    def paid_after(self) -> float | None:
        """Seconds of running with kernels after which they saved what the first process lost.

        None where that is never, or not known because the pairs say neither faster nor slower.
        """
        native, warm = self.native_seconds().median, self.warm_seconds().median
        lost = self.cold.seconds - native
        if lost <= 0:
            return self.cold.seconds
        saved = native - warm
        if saved <= 0 or self.ratio().sign <= 0:
            return None
        return self.cold.seconds + lost / saved * warm

    def memory_ratio(self) -> float | None:
        """The program's memory with kernels over native's, by medians."""
        native = statistics.median(run.program_bytes for run in self.natives)
        kernels = statistics.median(run.program_bytes for run in self.warm)
        return kernels / native if native else None

    def gpu_bytes(self, runs: Sequence[Run]) -> float | None:
        """The median of the runs that used a GPU."""
        values = [run.gpu_bytes for run in runs if run.gpu_bytes is not None]
        return statistics.median(values) if values else None

    def gpu_ratio(self) -> float | None:
        """As `memory_ratio`, of memory on GPUs."""
        native, kernels = self.gpu_bytes(self.natives), self.gpu_bytes(self.warm)
        return kernels / native if native and kernels is not None else None

    def codes(self) -> tuple[list[int], list[int]]:
        """The exit statuses that native runs had, and those with kernels."""
        natives = {self.first_native.code, *(run.code for run in self.natives)}
        kernels = {self.cold.code, *(run.code for run in self.warm)}
        return sorted(natives), sorted(kernels)

    def output(self) -> OutputComparison:
        """What the runs printed, compared."""
        return compare_outputs(
            [run.lines for run in (self.first_native, *self.natives)],
            [run.lines for run in (self.cold, *self.warm)],
        )

    def unsettled(self) -> int:
        """Processes after the first one that still had kernels made, or ended before they were."""
        return sum(
            any(note.get("compiles", 0) + note.get("not_yet", 0) > 0 for note in run.notes)
            for run in self.warm
        )

    def not_yet(self) -> int:
        """Kernels that were being made when the last process ended."""
        return sum(note.get("not_yet", 0) for note in (self.warm or [self.cold])[-1].notes)

    def hits(self) -> int:
        """Calls that kernels answered in the last process."""
        return sum(note.get("hits", 0) for note in (self.warm or [self.cold])[-1].notes)

    def verdict(self) -> str:
        """The whole of it in one line of plain words."""
        ratio = self.ratio()
        text = f"x{ratio.value:.2f}"
        ends = f"({ratio.low:.2f} to {ratio.high:.2f})"
        if len(self.pairs) < 2:
            said = f"{text} of native's speed in a single pair of runs, which may be chance"
        elif ratio.sign > 0:
            said = f"{text} faster {ends} from the second process on"
        elif ratio.sign < 0:
            said = f"slower: {text} of native's speed {ends} from the second process on"
        else:
            said = (
                f"no difference in speed that {counted(len(self.pairs), 'pair')} of runs can tell: "
                f"{text} {ends} from the second process on"
            )
        memory, gpu = self.memory_ratio(), self.gpu_ratio()
        if memory is not None:
            said += f"; {memory:.2f} of its memory"
        if gpu is not None:
            said += f", {gpu:.2f} of its GPU memory"
        return said

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratio = self.ratio()
        return {
            "verdict": self.verdict(),
            "fresh": self.fresh,
            "native_seconds": [run.seconds for run in self.natives],
            "first_native_seconds": self.first_native.seconds,
            "cold_seconds": self.cold.seconds,
            "warm_seconds": [run.seconds for run in self.warm],
            "ratio": ratio.value,
            "ratio_low": ratio.low if len(self.pairs) > 1 else None,
            "ratio_high": ratio.high if len(self.pairs) > 1 else None,
            "paid_after_seconds": self.paid_after(),
            "progress": {
                name: progress.__dict__ if progress else None
                for name, progress in (
                    ("cold", progress_of(self.natives, [self.cold])),
                    ("warm", progress_of(self.natives, self.warm)),
                )
            },
            "memory": {
                "native_bytes": [run.program_bytes for run in self.natives],
                "cold_bytes": self.cold.program_bytes,
                "warm_bytes": [run.program_bytes for run in self.warm],
                "ratio": self.memory_ratio(),
                "cold_worker_bytes": self.cold.worker_bytes,
                "warm_worker_bytes": [run.worker_bytes for run in self.warm],
                "gpu_native_bytes": self.gpu_bytes(self.natives),
                "gpu_cold_bytes": self.cold.gpu_bytes,
                "gpu_warm_bytes": self.gpu_bytes(self.warm),
                "gpu_ratio": self.gpu_ratio(),
            },
            "output": self.output().as_dict(),
            "exit_codes": dict(zip(("native", "kernels"), self.codes(), strict=True)),
            "unsettled": self.unsettled(),
            "not_yet": self.not_yet(),
            "hits": self.hits(),
        }
