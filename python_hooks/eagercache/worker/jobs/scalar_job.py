"""One request for a kernel that takes numbers of the call as arguments (a learning rate).

Lowered twice, built (with others), proved on several numbers, timed on the call's own, published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import NotBitwise
from eagercache.worker.inductor.call_graph import build_graph, example_inputs
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Lowered, Tools
from eagercache.worker.inductor.generated_text import admit, read_generated_text
from eagercache.worker.inductor.launch_plan import LaunchPlan
from eagercache.worker.inductor.scalar_text import read_scalar_plan
from eagercache.worker.inductor.text_takers import refuse_other_writes
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.jobs.class_job import FamilyJob
from eagercache.worker.jobs.outcome import Built, Outcome
from eagercache.worker.samples.draws import SEED
from eagercache.worker.samples.ordinary_operands import ordinary_inputs
from eagercache.worker.samples.scalar_class import ScalarFamily
from eagercache.worker.timing import timing
from eagercache.worker.validation import validate
from eagercache.worker.validation.native import Reshaped, native_answers

# Says of a decision for native that it holds for every number, so that none is tried by itself.
_OF_ALL = {"of_all_numbers": "1"}


class ScalarJob(FamilyJob):
    """A job whose kernel answers a scalar class."""

    _forms: tuple[str, ...] = ("scalars",)

    def __init__(self, request: Mapping[str, Any], core: Any) -> None:
        super().__init__(request, core)
        self._family: ScalarFamily | None = None

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        store = self._enter(find_store)
        if self.outcome is not None:
            return
        self._family = family = ScalarFamily(self.description)
        self._call = call = family.call
        self._refuse_denied(call)
        self._register()
        with call.state.applied():
            with self.clock.step("native"):
                try:
                    natives = native_answers(call)
                except Reshaped as reshaped:
                    raise CompileRefused(str(reshaped)) from reshaped
            if self._try_untried(self._untried_numbers):
                return
            with self.clock.step("compile"):
                self.lowered = self._lower_marked(
                    family, len(natives[0].outputs), find_tools(store)
                )
        self._adopt(natives[0].outputs)
        self.clock.add({f"compile.{k}": v for k, v in self.lowered.seconds.items()})

    @property
    def contract(self) -> str:
        """What the shared object says of this job's entry."""
        return self._contract_of("scalars", self._plan.to_json())

    def _marks(self, family: ScalarFamily) -> tuple[Sequence[float], Sequence[float]]:
        """What the numbers are in the two lowerings. Raises CompileRefused."""
        first, second = family.marks(0), family.marks(1)
        if first is None or second is None:
            raise CompileRefused("too many numbers")
        return first, second

    def _adopt(self, outputs: Sequence[torch.Tensor]) -> None:
        """Takes the strides of native's outputs over into the plan of what was lowered."""
        assert self.lowered is not None and isinstance(self.lowered.plan, LaunchPlan)
        self._plan = self.lowered.plan.with_strides([list(output.stride()) for output in outputs])

    def _built(self) -> Built:
        """The kernel."""
        assert self.lowered is not None and self._library is not None
        objects = (("so", str(self._library)),)
        return Built(objects, self.lowered, "scalars", self._plan.to_json())

    def _lower_marked(self, family: ScalarFamily, num_returns: int, tools: Tools) -> Lowered:
        """Inductor's text with arguments in the places of the numbers. Raises CompileRefused."""
        begin = time.process_time()
        marks = self._marks(family)
        texts: list[tuple[str, str]] = []
        for draw, drawn in enumerate(marks):
            texts.append(self._texts(family.member(drawn), num_returns, tools, f"draw{draw}"))
        text = read_generated_text(*texts[0])
        admit(text, family.call)
        try:
            plan = read_scalar_plan(texts[0], marks[0], texts[1], marks[1])
            plan = plan.with_checks(ordinary_inputs(family.call))
        except NotUnderstood as error:
            raise CompileRefused(f"no kernel with numbers as arguments: {error}") from error
        refuse_other_writes(plan, family.call)
        return Lowered(text, plan, None, "", {"lower": round(time.process_time() - begin, 4)})

    def _texts(self, call: Call, num_returns: int, tools: Tools, name: str) -> tuple[str, str]:
        assert self._directory is not None
        directory = self._directory / name
        directory.mkdir()
        texts: list[tuple[str, str]] = []
        graph = build_graph(call, num_returns)
        tools.read_texts(graph, example_inputs(call), directory, lambda *both: texts.append(both))
        if not texts:
            raise CompileRefused("nothing was generated")
        return texts[-1]

    def _conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        assert self._family is not None
        family, kernel = self._family, self._built()
        outcome = Outcome("kernel", kernel=kernel)
        proved = family.proof_numbers()
        with family.call.state.applied():
            for numbers in proved:
                where = f"numbers {_text(numbers)}"
                member = family.member(numbers)
                try:
                    self._prove_member(member, kernel, outcome, where)
                except NotBitwise as differs:
                    if numbers != family.numbers:
                        raise CompileRefused(str(differs)) from differs
                    # Kernels for one number each would differ as much.
                    self.outcome = Outcome("native", str(differs), facts=_OF_ALL)
                    return
            self._time_own(family, kernel, outcome)
        outcome.facts["proved_numbers"] = "; ".join(map(_text, proved))[:4_000]
        self._decide(outcome)
        if outcome.verdict == "native":
            outcome.facts.update(_OF_ALL)
        self.outcome = outcome

    def _untried_numbers(self, kernel: Built) -> Outcome:
        """What another machine's kernel is on the numbers on which one of ours is proved."""
        assert self._family is not None and self._untried is not None
        outcome = Outcome("kernel", kernel=kernel)
        for numbers in self._family.proof_numbers():
            member, where = self._family.member(numbers), f"numbers {_text(numbers)}"
            self._prove_member(member, kernel, outcome, where)
        if self._untried.times:
            self._time_own(self._family, kernel, outcome)
            self._decide(outcome)
            if outcome.verdict == "native":
                outcome.facts.update(_OF_ALL)
        return outcome

    def _time_own(self, family: ScalarFamily, kernel: Built, outcome: Outcome) -> None:
        """Times the kernel on the call's own numbers."""
        probe = self._probe()
        sample = family.call.sample("unit", SEED)
        validate.capture(family.call, probe, sample, self.request["choose"])
        self._load(probe, kernel)
        with timing.machine_to_itself(), self.clock.step("time"):
            outcome.timing = timing.time_call(probe)


def _text(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.6g}" for number in numbers[:8])
