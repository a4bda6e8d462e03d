"""The half of a job that tries what another kind of machine made, and times what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagercache.calls.call import Call
from eagercache.calls.numerics import is_device_error
from eagercache.worker.jobs.clock import Clock
from eagercache.worker.jobs.outcome import Built, Outcome, forget_locals, one_line
from eagercache.worker.jobs.untried import Untried, note_left
from eagercache.worker.timing import bandwidth, timing
from eagercache.worker.validation import validate

if TYPE_CHECKING:
    from eagercache.calls.samples import Sample
    from eagercache.worker.validation.native import Native


class Trying:
    """See `Job`, whose fields and steps these are."""

    request: Mapping[str, Any]
    outcome: Outcome | None
    clock: Clock
    _forms: tuple[str, ...] = ("bare", "container")  # of other machines' kernels that it can try
    _untried: Untried | None  # another kind of machine's kernel

    def _prove(self, call: Call, probe: Any, natives: list[Native], kernel: Built) -> Outcome:
        raise NotImplementedError

    def _decide(self, outcome: Outcome) -> None:
        raise NotImplementedError

    def _take_untried(self, call: Call, probe: Any, natives: list[Native]) -> bool:
        """Whether another kind of machine's kernel, tried on this call, is the outcome."""
        return self._try_untried(lambda kernel: self._untried_outcome(call, probe, natives, kernel))

    def _try_untried(self, prove: Callable[[Built], Outcome]) -> bool:
        """The same, as ``prove`` tries it. What fails is left, and said."""
        untried = self._untried
        if untried is None:
            return False
        kernel = untried.built(self._forms)
        if kernel is None:
            self._untried = None
            return False
        try:
            outcome = prove(kernel)
        except Exception as error:
            if is_device_error(error):
                raise
            note_left(untried.manifest, one_line(error))
            forget_locals(error)
            self._untried = None
            return False
        outcome.published = outcome.verdict == "kernel"  # by who made it
        self.outcome = outcome
        return True

    def _untried_outcome(
        self, call: Call, probe: Any, natives: list[Native], kernel: Built
    ) -> Outcome:
        """Raises what proving raises."""
        outcome = self._prove(call, probe, natives, kernel)
        if self._untried is not None and self._untried.times:
            self._time(call, probe, natives, outcome)
            self._decide(outcome)
        return outcome

    def _time(self, call: Call, probe: Any, natives: Sequence[Native], outcome: Outcome) -> None:
        """Times both sides; the outcome has what came of it."""
        with timing.machine_to_itself(), self.clock.step("time"):
            outcome.timing = timing.time_on_each(
                probe, self._timed_data(call, probe, natives), float(self.request["margin"])
            )
            outcome.facts.update(bandwidth.facts_of(call, natives[0].outputs))

    def _timed_data(
        self, call: Call, probe: Any, natives: Sequence[Native]
    ) -> Iterator[Callable[[], None]]:
        """Puts the call on other data into the probe: what it holds, then numbers from 0 to 1."""
        yield lambda: None
        if self.request["choose"] == "always":
            return
        unit = [native.sample for native in natives[1:] if native.fill == "unit"]
        if unit:
            yield lambda: self._capture(call, probe, unit[0].clone())

    def _capture(self, call: Call, probe: Any, sample: Sample) -> None:
        validate.capture(call, probe, sample, self.request["choose"])
