"""What a warm-up raises."""

from __future__ import annotations


class WarmError(ValueError):
    """Bad input, or a store that cannot be used: one line with the remedy."""
