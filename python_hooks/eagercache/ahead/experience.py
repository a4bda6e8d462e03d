"""What a compile is expected to take and to save, as a store's entries tell of earlier ones."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from eagercache.base import entry_facts
from eagercache.service.request import tensor_sizes

# CPU seconds of one bare kernel, proof and timing included, where the store has none to compare;
# and what each element of its arguments adds, in the proof's samples.
USUAL_SECONDS = 2.0
LEAST_SECONDS = 0.2
SECONDS_PER_ELEMENT = 4e-7
USUAL_BYTES = 16 << 10
# Of native's time that a kernel is expected to save, where nothing is known of the operator.
USUAL_SHARE_SAVED = 0.3


class Experience:
    """What the store's entries tell about operators: seconds, bytes, and the share saved."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._saved: dict[str, list[float]] = defaultdict(list)
        self._bytes: list[int] = []
        for row in rows:
            self.add(row)
            if row["kind"] == "kernel":
                self._bytes.append(row["bytes"])

    def add(self, manifest: Mapping[str, Any]) -> None:
        """Learns from one more entry."""
        known = manifest["facts"]
        op = known.get("op", "")
        seconds = entry_facts.compile_seconds(known)
        if seconds is not None:
            seconds -= _proof_seconds(_known_call(known))
            self._seconds[op].append(max(LEAST_SECONDS, seconds))
        gain = entry_facts.gain(known) if manifest["kind"] == "kernel" else None
        self._saved[op].append(max(0.0, 1.0 - 1.0 / gain) if gain else 0.0)

    def seconds(self, op: str, arguments: Iterable[Mapping[str, Any]]) -> float:
        """Of CPU time for one more key."""
        known = self._seconds.get(op) or [s for one in self._seconds.values() for s in one]
        usual = sum(known) / len(known) if known else USUAL_SECONDS
        return usual + _proof_seconds(arguments)

    def share_saved(self, op: str) -> float:
        """Of native's time; the usual one counts as one more entry."""
        known = self._saved.get(op, [])
        return (sum(known) + USUAL_SHARE_SAVED) / (len(known) + 1)

    def bytes(self) -> int:
        """Of one kernel on disk."""
        return sum(self._bytes) // len(self._bytes) if self._bytes else USUAL_BYTES


def _known_call(known: Mapping[str, str]) -> list[dict[str, Any]]:
    try:
        return list(json.loads(known.get("call", "{}")).get("args", []))
    except ValueError:  # cut off
        return []


def _proof_seconds(arguments: Iterable[Mapping[str, Any]]) -> float:
    """What the size of a call adds to its compile."""
    elements = sum(math.prod(sizes) for sizes in tensor_sizes(arguments))
    return SECONDS_PER_ELEMENT * elements
