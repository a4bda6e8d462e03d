"""A request for a whole module on its way through the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagercache.calls.numerics import ProofFailed, is_device_error, is_out_of_memory
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import Outcome, one_line
from eagercache.worker.jobs.untried import note_left, origin_of
from eagercache.worker.modules.answers import decide
from eagercache.worker.modules.compile import ModuleResult, compile_module
from eagercache.worker.modules.sizes import JudgeSizes
from eagercache.worker.modules.training import compile_training
from eagercache.worker.modules.training_sizes import JudgeTrainingSizes
from eagercache.worker.timing.timing import UNDECIDED


class ModuleJob(Job):
    """One module's call. Everything happens in `begin`: nothing is built with others."""

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        store = self._enter(find_store)
        if self.outcome is not None:
            return
        assert self._directory is not None
        with self.clock.step("module"):
            tools = find_tools(store)
            try:
                tried, result = self._try_or_make(tools)
            finally:
                tools.rest()
        self.clock.add({f"module.{step}": value for step, value in result.seconds.items()})
        margin = float(self.request["margin"])
        faster, reason = decide(result.timing, margin)
        if result.chosen is not None:
            faster = any(chosen for _, chosen in result.chosen)
            undecided = reason == UNDECIDED or not result.chosen  # where others disturbed them all
            reason = "" if faster else UNDECIDED if undecided else "slower"
        verdict = "kernel" if faster or self.request["choose"] == "always" else "native"
        self.outcome = Outcome(verdict, reason, module=result, timing=result.timing)
        if tried and verdict == "kernel" and self._untried is not None:
            self.outcome.facts.update(origin_of(self._untried.facts))
            self.outcome.published = True
        self._untried = None  # what is published is what was found here
        self._note_undecided(self.outcome)

    def _try_or_make(self, tools: Tools) -> tuple[bool, ModuleResult]:
        """(whether the kernel is another kind of machine's, what was found out about it)."""
        untried = self._untried
        if untried is not None:
            made = [Path(path) for _, path in untried.objects]
            try:
                result = self._compile(tools, made)
            except (ProofFailed, RuntimeError) as error:  # that of a kernel that does not load
                if is_device_error(error) or is_out_of_memory(error):
                    raise
                note_left(untried.manifest, one_line(error))
            else:
                return result.path in made, result
        return False, self._compile(tools)

    def _compile(self, tools: Tools, made: Sequence[Path] = ()) -> ModuleResult:
        assert self._directory is not None
        sizes = self.description.get("open")
        own = self.description, self._directory, tools, self._core
        self._core.forget_object_classes()  # those of a script come anew with each request
        if self.description.get("gradients"):
            return compile_training(*own, JudgeTrainingSizes(self.request) if sizes else None, made)
        return compile_module(*own, JudgeSizes(self.request) if sizes else None, made)
