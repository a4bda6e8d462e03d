"""A request for a kernel of a Python function's operator, on its way through the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from . import custom_operators
from .calls import Call, autocast_set
from .commands import CompileRefused
from .compile import Lowered, Tools
from .cuda_job import CudaJob
from .function_trace import index_ranges, indexes_by_data, observe, trace
from .job import Job


class FunctionJob(Job):
    """The function is put into place before each step: a batch may hold two versions of it."""

    _composed = True
    _operator: custom_operators.CustomOperator[Any, Any] | None = None

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
            call.index_ranges = {bounds.input: (bounds.low, bounds.high) for bounds in self._ranges}
        return graph

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
        call.index_ranges = {bounds.input: (bounds.low, bounds.high) for bounds in ranges}

    def _lower(
        self, call: Call, natives: Sequence[Any], tools: Tools, name: str, *, allow_bare: bool
    ) -> Lowered:
        with autocast_set(
            self.description["dispatch_key"].lower(), None
        ):  # its casts are in the graph
            return super()._lower(call, natives, tools, name, allow_bare=allow_bare)

    def _conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        self._put_into_place()
        super()._conclude(find_tools)


class FunctionCudaJob(FunctionJob, CudaJob):
    """The same on CUDA."""


def make_function_job(request: Mapping[str, Any], core: Any) -> Job:
    """The job for the device of a request."""
    on_cuda = request["description"]["dispatch_key"] == "CUDA"
    return (FunctionCudaJob if on_cuda else FunctionJob)(request, core)
