"""When a warm-up stops: after a time, or at a size."""

from __future__ import annotations

from dataclasses import dataclass

from eagercache.ahead.errors import WarmError
from eagercache.base import config


@dataclass(frozen=True)
class Budget:
    """When to stop. None: no limit."""

    seconds: float | None = None
    bytes: int | None = None

    @staticmethod
    def parse(text: str) -> Budget:
        """Of "120", "120s", "10min", "2h" or "500MB"; raises WarmError."""
        for unit, factor in (("min", 60.0), ("s", 1.0), ("h", 3600.0), ("", 1.0)):
            number = text.removesuffix(unit)
            if unit and number == text:
                continue
            try:
                seconds = float(number) * factor
            except ValueError:
                continue
            if seconds > 0:
                return Budget(seconds=seconds)
        try:
            size = config.parse_size(text) if text[-1:] in "bBgGtT" or text[-2:] == "iB" else 0
        except config.BadValue:
            size = 0
        if size > 0:
            return Budget(bytes=size)
        raise WarmError(f"the budget {text!r} is neither a time (120s, 10min, 2h) nor a size (2GB)")


def budget_of(budget: str | float | Budget | None) -> Budget:
    """Of what `warm_up` is given; raises WarmError."""
    if isinstance(budget, Budget):
        return budget
    if budget is None:
        return Budget()
    return Budget.parse(str(budget))
