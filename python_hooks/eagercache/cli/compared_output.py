"""What two runs of a program printed, compared: their numbers as numbers, the rest as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# A digit of a name, as in "layer3" or "v1.2.3", is text.
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w]|\.\d)"
    r"|(?<![\w.])[-+]?(?:nan|inf)(?!\w)",
)


def numbers_of(line: str) -> tuple[str, list[float]]:
    """A line's text with a mark in the place of each number, and the numbers."""
    found: list[float] = []

    def note(match: re.Match[str]) -> str:
        found.append(float(match[0].replace(",", "")))
        return "#"

    # What ends in a unit ("3.2s", "10%") is a number too.
    spaced = re.sub(r"(?<=\d)(?=(?:ns|us|ms|s|it/s|GB|MB|KB|B|x|%)(?![\w]))", " ", line)
    return _NUMBER.sub(note, spaced), found


def distance(one: float, other: float) -> float:
    """The difference as a share of the larger one; 0 for equal numbers, two NaNs among them."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


@dataclass(frozen=True)
class Difference:
    """Where two runs differ: the line's number, from 1, both lines, and both numbers."""

    line: int
    native: str
    kernels: str
    native_number: float | None = None
    kernels_number: float | None = None
    relative: float = math.inf


@dataclass
class OutputComparison:
    """What became of the numbers and lines of a program's standard output.

    Numbers and lines that differ between native runs as well (times, what no seed decides) say
    nothing of kernels; they are counted and left out of the rest.

    Attributes:
        lines: of the native run.
        numbers: that were compared.
        changing: numbers and lines that no two native runs need have in common.
        differing: numbers that differ.
        largest: the number that differs most, None where none does.
        text: the first line whose words differ, None where none does.
        missing: lines that one side has more.
    """

    lines: int = 0
    numbers: int = 0
    changing: int = 0
    differing: int = 0
    largest: Difference | None = None
    text: Difference | None = None
    missing: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs that is the same in all native runs."""
        return self.largest is None and self.text is None and self.missing == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        body = asdict(self)
        for name in ("largest", "text"):
            if body[name] is not None:
                for key, value in body[name].items():
                    if isinstance(value, float) and not math.isfinite(value):
                        body[name][key] = str(value)
        return {**body, "same": self.same}


def compare_outputs(
    natives: Sequence[Sequence[str]], kernels: Sequence[Sequence[str]]
) -> OutputComparison:
    """Compares the lines of each run with kernels with those of the first native run."""
    result = OutputComparison()
    if not natives or not kernels:
        return result
    reference = [numbers_of(line) for line in natives[0]]
    result.lines = len(reference)
    if all(len(lines) == len(reference) for lines in natives):
        result.missing = max(abs(len(lines) - len(reference)) for lines in kernels)
    others = [[numbers_of(line) for line in lines] for lines in natives[1:]]
    parsed = [[numbers_of(line) for line in lines] for lines in kernels]
    for index, (text, numbers) in enumerate(reference):
        rows = [run[index] for run in others if index < len(run)]
        if len(rows) < len(others) or any(row[0] != text for row in rows):
            result.changing += 1
            continue
        steady = [
            place
            for place, value in enumerate(numbers)
            if all(distance(value, row[1][place]) == 0.0 for row in rows)
        ]
        result.changing += len(numbers) - len(steady)
        result.numbers += len(steady)
        differing: set[int] = set()
        for run, lines in zip(parsed, kernels, strict=True):
            if index >= len(run):
                continue
            pair = (index + 1, natives[0][index], lines[index])
            if run[index][0] != text:
                result.text = result.text or Difference(*pair)
                continue
            differing |= _compare_numbers(result, pair, numbers, run[index][1], steady)
        result.differing += len(differing)
    return result


def _compare_numbers(
    result: OutputComparison,
    pair: tuple[int, str, str],
    numbers: Sequence[float],
    others: Sequence[float],
    places: Sequence[int],
) -> set[int]:
    """The places whose numbers differ; the largest difference so far is kept."""
    found = set()
    for place in places:
        relative = distance(numbers[place], others[place])
        if relative > 0.0:
            found.add(place)
            if result.largest is None or relative > result.largest.relative:
                result.largest = Difference(*pair, numbers[place], others[place], relative)
    return found
