"""A request for a kernel of a Python function with symbolic sizes, on its way through the worker.

The function is traced with the sizes open that were seen to change. What it asks about them on the
way (Python's own comparisons among it) is a guard of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.functions.trace import index_ranges, indexes_by_data, observe, trace
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Lowered, Tools
from eagercache.worker.inductor.size_expressions import evaluate
from eagercache.worker.jobs.cuda_shape_job import CudaShapeJob
from eagercache.worker.jobs.function_job import FunctionJob
from eagercache.worker.jobs.outcome import Built, Outcome
from eagercache.worker.jobs.shape_job import ShapeJob, with_symbols
from eagercache.worker.samples.shape_class import ShapeFamily, groups

if TYPE_CHECKING:
    import torch
    import torch.fx


class FunctionShapeJob(FunctionJob, ShapeJob):
    """A job whose kernel answers a shape class of a function's operator."""

    def __init__(self, request: Mapping[str, Any], core: Any) -> None:
        super().__init__(request, core)
        self._names: tuple[str, ...] = ()  # of the symbols, in the family's order

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        self._put_into_place()
        super()._begin(find_store, find_tools)

    def _symbolic_graph(
        self, family: ShapeFamily, fakes: Sequence[torch.Tensor], names: Sequence[str]
    ) -> torch.fx.GraphModule:
        assert self._operator is not None
        if family.has_open_strides:
            raise CompileRefused("the function may ask for a stride that sizes do not say")
        observe(self._operator, family.call)
        graph = trace(self._operator, family.symbolic(), fakes, family.tied_sizes)
        self._names = tuple(names)
        self._ranges = index_ranges(graph.graph, family.call)
        on_gpu = self.description["dispatch_key"] == "CUDA"
        if on_gpu and (self._ranges or indexes_by_data(graph.graph)):
            raise CompileRefused("kernels on a GPU that index by values are for one size alone")
        if not self._ranges and indexes_by_data(graph.graph):
            raise CompileRefused("it indexes by values in a way that is checked for one size alone")
        return graph

    def _untried_sizes(self, kernel: Built) -> Outcome:
        assert self._family is not None
        with self._below_autocast():  # what the function indexes by is drawn as its trace says
            fakes, _, symbols = with_symbols(self._family)
            self._symbolic_graph(self._family, fakes, symbols.names)
        return super()._untried_sizes(kernel)

    def _lower_shapes(self, family: ShapeFamily, tools: Tools) -> Lowered:
        with self._below_autocast():
            lowered = super()._lower_shapes(family, tools)
        if not groups(family.values, self._sized_of(lowered).admits):
            raise CompileRefused("the function is another program for every size")
        return lowered

    def _member(self, family: ShapeFamily, values: Sequence[int], further: int = 0) -> Call:
        member = super()._member(family, values, further)
        named = dict(zip(self._names, values, strict=True))
        for bounds in self._ranges:
            low, high = (evaluate(str(end), named) for end in (bounds.low, bounds.high))
            assert low is not None
            assert high is not None
            member.index_ranges[bounds.input] = low, high
        return member

    def _conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        try:
            try:
                super()._conclude(find_tools)
            except ProofFailed:
                if not self._take_exact(find_tools):
                    raise
                super()._conclude(find_tools)
        except ProofFailed as error:
            # Long sums err by more than is allowed: a kernel for one size may do.
            raise CompileRefused(f"no kernel with symbolic sizes: {error}") from error


class FunctionCudaShapeJob(FunctionShapeJob, CudaShapeJob):
    """The same on CUDA."""
