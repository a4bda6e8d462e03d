"""What became of the calls of a module, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass

from eagercache.base import config


@dataclass(frozen=True)
class ModuleStats:
    """What became of the calls of one module.

    Attributes:
        name: its class.
        hits: calls answered by a kernel.
        pending: calls answered by its forward while there was no verdict.
        native: calls answered by its forward because that is faster, or the only right way.
        aside_reasons: calls that its forward answered for another reason, by reason.
        state: "watched", "new" (not looked at yet) or "refused".
        reason: why there is no kernel; empty when there is one or it is not decided.
        training_hits: those of ``hits`` that need gradients, whose backward is a kernel too.
        training_reason: ``reason`` for calls that need gradients.
        identity: modules of one identity share their kernels.
        replayed: those of ``hits`` that were one launch of a CUDA graph.
        being_made: whether a kernel for calls of it has been asked for, and is not there yet.
        replay: what is replayed and how fast, or why not; empty where no call has come often.
    """

    name: str
    hits: int
    pending: int
    native: int
    aside_reasons: dict[str, int]
    state: config.ModuleState
    reason: str
    training_hits: int = 0
    training_reason: str = ""
    identity: str = ""
    replayed: int = 0
    replay: str = ""
    being_made: bool = False

    def line(self, path: str) -> str:
        """For people; ``path``: where the module is below the one that they asked about."""
        asides = ", ".join(f"{count} {reason}" for reason, count in self.aside_reasons.items())
        calls = f"{self.hits} by kernel, {self.pending + self.native} by its forward"
        refused = self.state == "refused"
        state = "a kernel is being made" if self.being_made else self.state
        verdict = f"refused: {self.reason}" if refused else (self.reason or state)
        training = self.training_reason if self.training_reason != self.reason else ""
        return (
            f"{path or '(root)'} ({self.name}): {calls}"
            + (f", aside: {asides}" if asides else "")
            + f"; {verdict}"
            + (f"; {self.training_hits} with gradients" if self.training_hits else "")
            + (f"; with gradients refused: {training}" if training else "")
            + (f"; {self.replay}" if self.replay else "")
        )
