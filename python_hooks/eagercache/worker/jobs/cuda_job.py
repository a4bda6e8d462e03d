"""A request for a CUDA kernel on its way through the worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagercache.base.entry_facts import DONE, DUE, SEARCH
from eagercache.base.toolchain import ToolchainError
from eagercache.calls.call import Call
from eagercache.calls.contract import contract_of, cubin_with
from eagercache.calls.numerics import NotBitwise, ProofFailed
from eagercache.worker.cuda import compile as cuda_compile
from eagercache.worker.cuda.compile import CudaLowered, PlanUnknown
from eagercache.worker.cuda.forms import APART, FIRST, Form, other_forms
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.jobs.cuda_search import BUDGETS, Tried, is_worth_it, search
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import Built, Outcome
from eagercache.worker.timing import bandwidth, timing
from eagercache.worker.timing.cuda_timing import CudaTiming, decide_cuda, time_cuda_call
from eagercache.worker.validation.native import Native, Reshaped


class CudaJob(Job):
    """One operator call on CUDA. Everything happens in `begin`: nothing is built with others.

    The worker's device 0 stands for the one that the call was made on.
    """

    _forms: tuple[str, ...] = ("cuda", "container")
    _first_form = FIRST
    _made: CudaLowered | None = None  # of the first form, where there is a plan

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Any]) -> None:
        store = self._enter(find_store)
        if self.outcome is not None:
            return
        make_tools = find_tools(store)  # gives Inductor and Triton their private folders
        call = self._open()
        self._refuse_denied(call)
        with call.state.applied():
            graph = self._trace(call)
            with self.clock.step("native"):
                try:
                    natives, probe = self._rebuild(call)
                except Reshaped as reshaped:
                    raise CompileRefused(str(reshaped)) from reshaped
                had_untried = self._untried is not None
                if self._take_untried(call, probe, natives):
                    return
                if had_untried:  # a probe is for one kernel
                    del probe
                    natives, probe = self._rebuild(call, natives)
            try:
                outcome = self._prove_first(call, probe, natives, graph, make_tools)
            except NotBitwise as differs:
                raise CompileRefused(str(differs)) from differs
            measured = self._time_call(call, probe, natives)
            with timing.machine_to_itself():
                facts = bandwidth.facts_of(call, natives[0].outputs)
            outcome = self._best(call, probe, natives, graph, outcome, measured, facts)
            outcome.facts.update(facts)
        self._decide(outcome)
        self.outcome = outcome

    def _prove_first(
        self,
        call: Call,
        probe: Any,
        natives: list[Native],
        graph: torch.fx.GraphModule | None,
        make_tools: Callable[[], Tools],
    ) -> Outcome:
        """The first kernel that can be had. Raises what `_make` and `_prove` raise."""
        built = self._make(call, natives, graph, make_tools)
        try:
            return self._prove(call, probe, natives, built)
        except ProofFailed:
            if self._made is None or not self._made.mixes:
                raise
        # Sums of blocks' sums over the columns may be farther off than sums of columns.
        with self.clock.step("compile"):
            built, self._made = self._make_form(call, natives, graph, APART)
        self._first_form, self.lowered = APART, self._made.lowered
        return self._prove(call, probe, natives, built)

    def _time(self, call: Call, probe: Any, natives: Sequence[Native], outcome: Outcome) -> None:
        outcome.timing = self._time_call(call, probe, natives)

    def _decide(self, outcome: Outcome) -> None:
        assert isinstance(outcome.timing, CudaTiming)
        faster, outcome.reason = decide_cuda(outcome.timing, float(self.request["margin"]))
        if not faster and self.request["choose"] != "always":
            outcome.verdict = "native"

    def _time_call(self, call: Call, probe: Any, natives: Sequence[Native]) -> CudaTiming:
        with timing.machine_to_itself(), self.clock.step("time"):
            return time_cuda_call(call, probe, natives[0].sample)

    def _best(
        self,
        call: Call,
        probe: Any,
        natives: list[Native],
        graph: torch.fx.GraphModule | None,
        outcome: Outcome,
        measured: CudaTiming,
        facts: Mapping[str, str],
    ) -> Outcome:
        """``outcome``, of the first form, or that of a faster one, as far as forms are searched."""
        outcome.timing = measured
        moved, copy = int(facts.get("bytes", 0)), float(facts.get("copy_gbps", 0.0))
        if outcome.kernel is None or outcome.kernel.form != "cuda" or not self._made:
            return outcome
        if not is_worth_it(measured, moved, copy):
            return outcome
        if not self._searches_now:
            outcome.facts[SEARCH] = DUE
            return outcome
        outcomes: dict[str, Outcome] = {}

        def attempt(form: Form, known: set[str]) -> Tried | None:
            with self.clock.step("search"):
                built, _ = self._make_form(call, natives, graph, form)
            if (identity := _identity_of(built)) in known:
                return None
            self._load(probe, built)
            return Tried(form, built, self._time_call(call, probe, natives), identity)

        def prove(tried: Tried) -> None:
            outcomes[tried.form.name] = self._prove(call, probe, natives, tried.kernel)

        first = Tried(self._first_form, outcome.kernel, measured, _identity_of(outcome.kernel))
        forms = other_forms(
            first.form, reduces=self._made.lowered.text.reduces, mixes=self._made.mixes
        )
        budget = BUDGETS.get(str(self.request.get("search")), BUDGETS["quick"])
        best = search(first, forms, attempt, prove, budget)
        outcome = outcomes.get(best.form.name, outcome)
        outcome.timing = best.timing
        outcome.facts |= {SEARCH: DONE, "kernel_form": best.form.name}
        return outcome

    def _make(
        self,
        call: Call,
        natives: list[Native],
        graph: torch.fx.GraphModule | None,
        make_tools: Callable[[], Tools],
    ) -> Built:
        """The kernel: cubins and a launch plan, or a container where no plan can be made."""
        assert self._directory is not None
        with self.clock.step("compile"):
            try:
                built, self._made = self._make_form(call, natives, graph, FIRST)
            except PlanUnknown as unknown:
                return self._contained(call, natives[0].outputs, graph, make_tools, unknown)
        self.lowered = self._made.lowered
        return built

    def _make_form(
        self,
        call: Call,
        natives: list[Native],
        graph: torch.fx.GraphModule | None,
        form: Form,
    ) -> tuple[Built, CudaLowered]:
        """Cubins and a launch plan, of the kernel in one form. Raises PlanUnknown, too."""
        assert self._directory is not None
        outputs = natives[0].outputs
        made = cuda_compile.lower(call, len(outputs), graph, form)
        written = set(made.plan.writes)
        if bool(written) != bool(call.written) or not call.written.issuperset(written):
            raise CompileRefused("the generated code writes other arguments than the operator")
        plan = made.plan.with_strides(self._strides(call, outputs))
        objects, text = [], plan.to_json()
        for index, cubin in enumerate(plan.cubins()):
            path = self._directory / f"{form.name}.{index}.cubin"
            made_for = contract_of(self.description["digest"], f"cuda {index}", text, "", ())
            path.write_bytes(cubin_with(cubin, made_for))
            objects.append(("cubin", str(path)))
        return Built(tuple(objects), made.lowered, "cuda", launch_plan=text), made

    def _contained(
        self,
        call: Call,
        outputs: Sequence[torch.Tensor],
        graph: torch.fx.GraphModule | None,
        make_tools: Callable[[], Tools],
        unknown: PlanUnknown,
    ) -> Built:
        assert self._directory is not None
        try:
            tools = make_tools()
        except (CompileFailed, ToolchainError) as failure:
            raise CompileRefused(f"{unknown}, and no container can be made: {failure}") from failure
        directory = self._directory / "container"
        directory.mkdir()
        strides = json.dumps(self._strides(call, outputs))
        self.lowered = made = cuda_compile.contain(
            call,
            len(outputs),
            graph,
            tools,
            directory,
            unknown,
            self._contract_of("container", "", strides),
        )
        return Built((("so", str(made.container)),), made, "container", output_strides=strides)

    def _prove(self, call: Call, probe: Any, natives: list[Native], kernel: Built) -> Outcome:
        outcome = super()._prove(call, probe, natives, kernel)
        torch.cuda.synchronize()
        return outcome

    def _load(self, probe: Any, kernel: Built) -> None:
        """Raises ProofFailed."""
        if kernel.form != "container":
            load_cubins(probe, kernel)
            return
        try:
            super()._load(probe, kernel)
        except RuntimeError as error:
            raise ProofFailed(f"the kernel does not load: {error}") from error

    def _strides(self, call: Call, outputs: Sequence[torch.Tensor]) -> list[list[int]]:
        """Native's, of what the operator makes anew."""
        fresh = call.fresh if len(call.op._schema.returns) > 1 else range(len(outputs))
        return [list(outputs[index].stride()) for index in fresh]


def load_cubins(probe: Any, kernel: Built) -> None:
    """Puts a kernel that a plan launches into the probe. Raises ProofFailed."""
    try:
        cubins = [Path(path).read_bytes() for _, path in kernel.objects]
        probe.load_cubins(cubins, kernel.launch_plan)
    except RuntimeError as error:
        raise ProofFailed(f"the kernel does not load: {error}") from error


def _identity_of(kernel: Built) -> str:
    """What two kernels that launch the same code in the same way have alike."""
    digest = hashlib.sha256(kernel.launch_plan.encode())
    for _, path in kernel.objects:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()
