"""What becomes of the text that Inductor generates: a plan, a container's text, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eagercache.calls import contract as contracts
from eagercache.calls.call import Call
from eagercache.worker.compat import aot_inductor
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.container import SEAMS
from eagercache.worker.inductor.generated_text import GeneratedText, admit, read_generated_text
from eagercache.worker.inductor.launch_plan import IndexRange, LaunchPlan, read_launch_plan
from eagercache.worker.inductor.vector_math import corrected, corrected_container, improved
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.samples.ordinary_operands import looked_at, ordinary_inputs


def _made_for(contract: str) -> str:
    """The text behind a container's that says of which entry it is."""
    return contracts.definition([contract]) if contract else ""


def as_it_is(kernel: str) -> str:
    """Kernels of which nothing is to be changed."""
    return kernel


class TextChecker:
    """Shows a whole graph's generated text to somebody, and has it compiled."""

    def __init__(
        self,
        check: Callable[[GeneratedText], None],
        beside: Callable[[], str] | None,
        better: Callable[[str], str],
        contract: str,
    ) -> None:
        self._contract = contract
        self._check = check
        self._beside = beside
        self._better = better
        self.checked = False

    def take(self, wrapper: str, kernel: str) -> tuple[str, str]:
        """The texts that AOTInductor is to make a container of."""
        self._check(read_generated_text(wrapper, kernel))
        self.checked = True
        wrapper = aot_inductor.checked_calls(wrapper)
        beside = self._beside() if self._beside else ""
        return wrapper + beside + _made_for(self._contract), self._better(kernel)


class TextReader:
    """Shows the generated text to somebody, who is content with it."""

    def __init__(self, read: Callable[[str, str], None]) -> None:
        self._read = read

    def take(self, wrapper: str, kernel: str) -> str | None:
        """Any string: nothing is to be compiled."""
        self._read(wrapper, kernel)
        return "read"


class TextTaker:
    """What becomes of the generated text of one call."""

    def __init__(
        self,
        call: Call,
        allow_bare: bool,
        ranges: Sequence[IndexRange] = (),
        *,
        improves: bool = False,
        contract: str = "",
    ) -> None:
        self._beside = SEAMS + _made_for(contract)
        self._call = call
        self._ranges = ranges
        self._allow_bare = allow_bare
        self._improves = improves
        self.text: GeneratedText | None = None
        self.plan: LaunchPlan | None = None
        self.exact: LaunchPlan | None = None
        self.why_container = ""

    def take(self, wrapper: str, kernel: str) -> str | tuple[str, str]:
        """The text is in the plan: any string. Two texts: AOTInductor is to make a container."""
        self.text = read_generated_text(wrapper, kernel)
        admit(self.text, self._call, checked=bool(self._ranges))
        if not self._allow_bare:
            admit(self.text, self._call)
            if looked_at(self._call):
                raise CompileRefused("its weights are to be looked at, and a bare kernel failed")
            self.why_container = "a bare kernel did not do"
            return wrapper + self._beside, corrected_container(kernel)
        try:
            self.plan = self._read_plan(wrapper, corrected(kernel))
            if self._improves:
                self.exact = self.plan
                self.plan = self._read_plan(wrapper, improved(kernel), distinct=True)
        except NotUnderstood as error:
            admit(self.text, self._call)  # a container checks nothing before it runs
            if self._call.written:
                raise CompileRefused(
                    f"it writes its arguments, and its text has {error}"
                ) from error
            if looked_at(self._call):
                raise CompileRefused(
                    f"its weights are to be looked at, and its text has {error}"
                ) from error
            self.why_container = str(error)
            return wrapper + self._beside, corrected_container(kernel)
        refuse_other_writes(self.plan, self._call)
        return "bare"

    def _read_plan(self, wrapper: str, kernel: str, *, distinct: bool = False) -> LaunchPlan:
        plan = read_launch_plan(wrapper, kernel, distinct=distinct)
        return plan.with_checks([*self._ranges, *ordinary_inputs(self._call)])


def refuse_other_writes(plan: LaunchPlan, call: Call) -> None:
    """Raises CompileRefused unless the plan writes what the call's operator writes."""
    if bool(plan.writes) != bool(call.written):
        raise CompileRefused("the generated code does not write what the operator writes")
    if not call.written.issuperset(plan.writes):
        raise CompileRefused("the generated code writes an argument that the operator reads")
