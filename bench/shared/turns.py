"""Processes that take turns on one core, for sides that one process cannot have both of.

An override of an operator cannot be taken away, and what was never hooked is the only honest
native. So each side is a process of its own, which stays, and times a block of calls whenever it is
asked to; only one of them runs at a time, and a disturbance of the machine meets all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.shared import frame

READY = "READY "


class Side:
    """A process that times what `serve` was given there. Stands on the caller's own core."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = ""
        assert self._process.stdout is not None
        while not line.startswith(READY):
            line = self._process.stdout.readline()
            if not line:
                raise SystemExit(f"{' '.join(command)}: exit {self._process.wait()}")
        # What the process says of itself.
        self.facts: dict[str, Any] = json.loads(line.removeprefix(READY))

    def ns(self, name: str, calls: int) -> float:
        """Nanoseconds a call of the function ``name``, the mean of ``calls``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, calls]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(blocks: Mapping[str, Callable[[int], float]], facts: Mapping[str, Any]) -> None:
    """The other end of a `Side`; ends the process when nobody asks any more.

    ``blocks`` make as many calls as they are told, and return the nanoseconds of one.
    """
    print(READY + json.dumps(facts), flush=True)
    for line in sys.stdin:
        name, calls = json.loads(line)
        print(blocks[name](calls), flush=True)
    sys.stdout.flush()
    os._exit(0)  # what is measured has no state to bring home


def compare(
    sides: Mapping[str, Side], name: str, *, rounds: int, calls: int
) -> dict[str, frame.Figure]:
    """Times the function ``name`` of every side that has it; the first is what others relate to.

    Every side is as often at each place of a round, and as often before as behind each other one.
    """
    for side in sides.values():
        side.ns(name, calls)
    times: dict[str, list[float]] = {who: [] for who in sides}
    for index in range(rounds):
        turn = index // 2 % len(sides)
        order = [*list(sides)[turn:], *list(sides)[:turn]]
        for who in order if index % 2 == 0 else reversed(order):
            times[who].append(sides[who].ns(name, calls))
    first = next(iter(sides))
    figures = {}
    for who, values in times.items():
        low, median, high = frame.quartiles(values)
        ratios = [mine / base for mine, base in zip(values, times[first], strict=True)]
        more = [mine - base for mine, base in zip(values, times[first], strict=True)]
        figures[who] = frame.Figure(
            f"{name} {who}", median, low, high, None if who == first else statistics.median(ratios),
            rounds, calls, None if who == first else frame.median_within(more),
        )  # fmt: skip
    return figures
