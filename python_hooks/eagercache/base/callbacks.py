"""What lower layers ask of those above them, who put it into place when they are imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nothing(operator: Any) -> None:
    """In a worker, where nothing is enabled."""


# The first call of an operator that `eagercache.op` made (frontend/api.py).
begin_operator: Callable[[Any], None] = _nothing
