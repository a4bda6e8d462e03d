"""A finding of `eagercache doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One finding. `state` is "ok", "note" or "problem"; a problem has a remedy."""

    name: str
    state: str
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
