"""What jobs have in common whose kernel answers many calls: it is proved on several of them."""

from __future__ import annotations

from typing import Any

from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import Built, Outcome
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
        kernel: Built,
        outcome: Outcome,
        where: str,
        others: int = 0,
    ) -> None:
        """Proves the kernel on one call; what is proved of all so far is in ``outcome``.

        It is proved on ``others`` beside this one.
        """
        with self.clock.step("prove"):
            natives = native_answers(member)
            probe = self._probe()
            validate.capture(member, probe, natives[0].sample.clone(), self.request["choose"])
            self._load(probe, kernel)
            try:
                proof = self._proof_of(kernel, member, probe, natives, others)
            except ProofFailed as error:
                raise type(error)(f"{error}, {where}") from error
        before = outcome.proof
        if before is None or proof.numerics != "bitwise":
            outcome.proof = proof
