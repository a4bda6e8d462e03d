"""A request for a kernel of a Python function's operator, on its way through the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from eagercache.callables import custom_operators
from eagercache.callables.function_operator import CustomOperator
from eagercache.calls.call import Call
from eagercache.calls.global_state import autocast_set
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.functions.trace import (
    fixed_bounds,
    index_ranges,
    indexes_by_data,
    observe,
    trace,
)
from eagercache.worker.graphs.indices import let_trap
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Lowered, Tools
from eagercache.worker.jobs.cuda_job import CudaJob
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import Outcome
from eagercache.worker.validation.native import Native


class FunctionJob(Job):
    """The function is put into place before each step: a batch may hold two versions of it."""

    _composed = True
    _operator: CustomOperator[Any, Any] | None = None

    def _open(self) -> Call:
        self._put_into_place()
        return super()._open()

    def _put_into_place(self) -> None:
        payload = self.description["function"]
        self._operator = custom_operators.rebuild(payload, self.description["identity"])

    def _trace(self, call: Call) -> torch.fx.GraphModule | None:
        assert self._operator is not None
        on_cpu = self.description["dispatch_key"] == "CPU"
        with self.clock.step("trace"):
            if not on_cpu:
                self._keep_indices_in_range(call)
            observe(self._operator, call)
            graph = trace(self._operator, call)
        if on_cpu:
            self._ranges = index_ranges(graph.graph, call)
            call.index_ranges = fixed_bounds(self._ranges)
        else:
            let_trap(graph)
        return graph

    def _improves(self, call: Call) -> bool:
        """Whether the kernel may have functions and sums that are not native's bits."""
        return self.request["numerics"] != "bitwise" and not call.state.deterministic

    def _prove_some_form(
        self,
        call: Call,
        probe: Any,
        natives: list[Native],
        find_tools: Callable[..., Tools],
    ) -> Outcome:
        try:
            return super()._prove_some_form(call, probe, natives, find_tools)
        except ProofFailed:
            if not self._take_exact(find_tools):
                raise
        return super()._prove_some_form(call, probe, natives, find_tools)

    def _take_exact(self, find_tools: Callable[[Any], Tools]) -> bool:
        """Builds the kernel of Inductor's own text in the place of ours. False where it is."""
        assert self.lowered is not None
        if self.lowered.exact is None:
            return False
        self.lowered = replace(self.lowered, plan=self.lowered.exact, exact=None)
        super().build_alone(find_tools(self.store))
        return self.outcome is None

    def build_alone(self, tools: Tools) -> None:
        """Builds this job's own shared object, of Inductor's text where ours does not compile."""
        super().build_alone(tools)
        if self.outcome is not None:
            failed, self.outcome = self.outcome, None
            if not self._take_exact(lambda _: tools):
                self.outcome = self.outcome or failed

    def _keep_indices_in_range(self, call: Call) -> None:
        """Before anything runs on a GPU, where an index out of range ends the context.

        Raises CompileRefused where the function indexes by what made-up data cannot be fit to.
        """
        assert self._operator is not None
        try:
            graph = trace(self._operator, call).graph
        except CompileRefused:
            return  # `observe` says why, with the line
        ranges = index_ranges(graph, call)
        if not ranges and indexes_by_data(graph):
            raise CompileRefused("it indexes by values that it computes")
        call.index_ranges = fixed_bounds(ranges)

    def _lower(
        self, call: Call, natives: Sequence[Any], tools: Tools, name: str, *, allow_bare: bool
    ) -> Lowered:
        with self._below_autocast():
            return super()._lower(call, natives, tools, name, allow_bare=allow_bare)

    def _below_autocast(self) -> contextlib.AbstractContextManager[None]:
        """For a block that lowers the traced graph: autocast's casts are in it."""
        return autocast_set(self.description["dispatch_key"].lower(), None)

    def _conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        self._put_into_place()
        super()._conclude(find_tools)


class FunctionCudaJob(FunctionJob, CudaJob):
    """The same on CUDA."""
