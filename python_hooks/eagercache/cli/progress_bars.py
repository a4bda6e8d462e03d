"""How far a program is, by the progress bars that it draws on standard error ("12/100")."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

_COUNT = re.compile(rb"(?<![\d/.])(\d{1,12})/(\d{1,12})(?![\d/])")
_ENDS = re.compile(rb"[\r\n]")
# What has no end of a line for so long is no bar.
_LONGEST = 1 << 12


class BarReader:
    """Reads a bar's steps out of a stream, those of bars one after the other added up.

    Of several bars, such as one within another, only those with most steps count.

    Attributes:
        steps: (steps done, seconds) as they were seen, both rising.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self._rest = b""
        self._most = 0
        self._before = 0  # steps of bars that have ended
        self._last = 0

    def feed(self, piece: bytes, seconds: float) -> None:
        """Takes what came after so many seconds."""
        *lines, rest = _ENDS.split(self._rest + piece)
        # A bar is drawn after the end of the one before it.
        for line in (*lines, rest):
            if match := _COUNT.search(line):
                self._take(int(match[1]), int(match[2]), seconds)
        self._rest = rest[-_LONGEST:]

    def _take(self, done: int, of: int, seconds: float) -> None:
        if done > of or of < self._most:
            return
        if of > self._most:
            self.steps.clear()
            self._most, self._before, self._last = of, 0, 0
        if done < self._last:
            self._before += self._last
        self._last = done
        total = self._before + done
        if total > (self.steps[-1][0] if self.steps else 0):
            self.steps.append((total, seconds))


def times_of_steps(runs: Sequence[Sequence[tuple[int, float]]], count: int) -> list[list[float]]:
    """When each run was at ``count`` places that all of them reached; [] where none are shared.

    Between what was seen steps are taken to be equally long.
    """
    if not all(runs) or len({run[-1][0] for run in runs}) != 1:
        return []
    first, last = max(run[0][0] for run in runs), runs[0][-1][0]
    if last - first < count:
        return []
    places = [first + (last - first) * index / (count - 1) for index in range(count)]
    return [[_time_at(run, place) for place in places] for run in runs]


def _time_at(run: Sequence[tuple[int, float]], place: float) -> float:
    after = bisect.bisect_left(run, place, key=lambda step: step[0])
    if after == 0:
        return run[0][1]
    (low, begin), (high, end) = run[after - 1], run[min(after, len(run) - 1)]
    return end if high == low else begin + (end - begin) * (place - low) / (high - low)
