"""Facts of an entry that more than one package reads."""

from __future__ import annotations

from collections.abc import Mapping

# Whether faster forms of a CUDA kernel were looked for, as in dispatcher/runtime/runtime_again.cc.
SEARCH = "search"
DUE = "due"
DONE = "done"


def search_is_due(facts: Mapping[str, str]) -> bool:
    """Whether forms of this entry's kernel may be faster, and none were looked for."""
    return facts.get(SEARCH) == DUE
