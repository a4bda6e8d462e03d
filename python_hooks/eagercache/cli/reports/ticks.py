"""Where the marks of an axis are."""

from __future__ import annotations

import math


def tick(most: float) -> float:
    """A round number between marks, so that there are five to ten up to ``most``."""
    power: float = 10.0 ** math.floor(math.log10(most))
    return next(power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if most / (power * part) <= 10)
