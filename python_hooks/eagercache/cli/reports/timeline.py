"""What a process of `eagercache run --report` did when: its calls, its steps, what was compiled.

Calls are looked at now and then from a thread, since a hit must not pay for it. Steps are those of
the program's optimizer; a program without one has calls alone.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# The first seconds are seen closely, and all of a long program at the same cost.
FIRST_PAUSE_SECONDS = 0.05
MOST_SAMPLES = 240
MOST_STEPS = 4096
MOST_OPTIMIZERS = 16


class Steps:
    """When an optimizer's steps ended: of a long program every second one, every fourth, and so on.

    Attributes:
        seen: (number of the step, seconds).
        count: of all steps.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.count = 0
        self._every = 1

    def note(self, seconds: float) -> None:
        """One has ended."""
        if self.count % self._every == 0:
            self.seen.append((self.count, seconds))
        self.count += 1
        if len(self.seen) >= MOST_STEPS:
            del self.seen[1::2]
            self._every *= 2


class Timeline:
    """One process's. `begin` and `ended` are called once each, by the process that it is of.

    ``each`` is called by the thread that looks, after each look.
    """

    def __init__(self, each: Callable[[], None] = lambda: None) -> None:
        self._each = each
        self._began = time.monotonic()
        self._began_at = time.time()
        # (seconds, calls answered by kernels, all calls of hooked operators and watched modules)
        self._samples: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        self._pause = FIRST_PAUSE_SECONDS
        # Of several optimizers the one with most steps is shown.
        self._steps: dict[int, Steps] = {}
        self._over = threading.Event()

    def begin(self) -> None:
        """Begins to look. What cannot be had of a torch is left out."""
        with contextlib.suppress(Exception):
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(self._note_step)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=self._look, name="eagercache-report", daemon=True).start()

    def _note_step(self, optimizer: object, *_: object) -> None:
        from torch.compiler import is_compiling

        if is_compiling():  # a step that torch.compile traces has no time of its own
            return
        if id(optimizer) not in self._steps and len(self._steps) >= MOST_OPTIMIZERS:
            return
        self._steps.setdefault(id(optimizer), Steps()).note(time.monotonic() - self._began)

    def _look(self) -> None:
        while not self._over.wait(self._pause):
            with contextlib.suppress(Exception):
                self._take_sample()
            with contextlib.suppress(Exception):
                self._each()
            if len(self._samples) >= MOST_SAMPLES:
                del self._samples[1::2]
                self._pause *= 2

    def _take_sample(self) -> None:
        hits, calls = _counters()
        self._samples.append((time.monotonic() - self._began, hits, calls))

    def ended(self, answers: Iterable[Any]) -> dict[str, Any]:
        """`so_far`, and no more looks."""
        self._over.set()
        with contextlib.suppress(Exception):
            self._take_sample()
        return self.so_far(answers)

    def so_far(self, answers: Iterable[Any]) -> dict[str, Any]:
        """For the report's file. ``answers`` are those of the compile services."""
        compiles = [
            {
                "op": one.op,
                "began": one.began - self._began,
                "ended": one.ended - self._began,
                "verdict": one.verdict,
                "reason": one.reason,
                "cpu_seconds": one.cpu_seconds,
            }
            for one in answers
        ]
        steps = max(self._steps.values(), key=lambda steps: steps.count, default=Steps())
        return {
            "began_at": self._began_at,
            "seconds": time.monotonic() - self._began,
            "samples": list(self._samples),
            "steps": steps.seen,
            "step_count": steps.count,
            "compiles": sorted(compiles, key=lambda one: one["began"]),
        }


def _counters() -> tuple[int, int]:
    from eagercache.base.load import core

    assert core is not None
    hits = calls = 0
    for row in core.operator_stats():
        hits += row["hits"]
        calls += row["hits"] + row["misses"] + row["pending"] + row["native"] + row["aside"]
    modules = sys.modules.get("eagercache.modules.manager")
    for _, one in modules.manager.stats() if modules is not None else ():
        hits += one.hits
        calls += one.hits + one.pending + one.native + sum(one.aside_reasons.values())
    return hits, calls


def rates(samples: Sequence[Sequence[float]]) -> list[tuple[float, float, float, float]]:
    """(from, to, calls a second by kernels, calls a second by native), between samples."""
    found = []
    for (begin, hits, calls), (end, more_hits, more_calls) in itertools.pairwise(samples):
        if (seconds := end - begin) > 0:
            by_kernels = max(0.0, more_hits - hits) / seconds
            by_native = max(0.0, more_calls - calls - (more_hits - hits)) / seconds
            found.append((begin, end, by_kernels, by_native))
    return found


def step_lengths(steps: Sequence[tuple[int, float]], most: int) -> list[tuple[float, float, float]]:
    """(from, to, mean seconds of a step there), of at most so many stretches."""
    count = len(steps) - 1
    if count < 1:
        return []
    edges = [steps[place] for place in (*range(0, count, -(-count // most)), count)]
    return [(t, u, (u - t) / (n - m)) for (m, t), (n, u) in itertools.pairwise(edges)]


def lanes(compiles: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Compiles in rows, so that none lies over another; ordered by their begin."""
    rows: list[list[Mapping[str, Any]]] = []
    for one in compiles:
        row = next((row for row in rows if row[-1]["ended"] <= one["began"]), None)
        if row is None:
            rows.append([one])
        else:
            row.append(one)
    return rows
