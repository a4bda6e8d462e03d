"""What jobs have in common whose kernel answers many calls: it is proved on several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import Outcome
from eagercache.worker.validation import validate
from eagercache.worker.validation.native import native_answers


class FamilyJob(Job):
    """A job whose kernel answers a class of calls."""

    def _register(self) -> None:
        description = self.description
        self._core.register(description["op"], description["overload"], description["dispatch_key"])

    def _probe(self) -> Any:
        description = self.description
        probe = self._core.Probe(
            description["op"], description["overload"], description["dispatch_key"]
        )
        probe.set_undefined(
            [i for i, a in enumerate(description["args"]) if a["kind"] == "undefined_tensor"]
        )
        return probe

    def _prove_member(
        self,
        member: Call,
        library: Path,
        launch_plan: str,
        outcome: Outcome,
        where: str,
        others: int = 0,
    ) -> None:
        """Proves the kernel on one call; what is proved of all so far is in ``outcome``.

        It is proved on ``others`` beside this one.
        """
        assert outcome.kernel is not None
        with self.clock.step("prove"):
            natives = native_answers(member)
            probe = self._probe()
            validate.capture(member, probe, natives[0].sample.clone(), self.request["choose"])
            probe.load(str(library), launch_plan)
            try:
                proof = self._proof_of(outcome.kernel, member, probe, natives, others)
            except ProofFailed as error:
                raise type(error)(f"{error}, {where}") from error
        before = outcome.proof
        if before is None or proof.numerics != "bitwise":
            outcome.proof = proof
