"""CPU seconds of a request, step by step."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping


class Clock:
    """CPU seconds by step, of this process and of the children it has waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds to the named steps."""
        for name, value in seconds.items():
            self.seconds[name] = round(self.seconds.get(name, 0.0) + value, 4)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Adds what the block takes to the step ``name``."""
        begin = _cpu_seconds()
        try:
            yield
        finally:
            self.add({name: _cpu_seconds() - begin})


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
