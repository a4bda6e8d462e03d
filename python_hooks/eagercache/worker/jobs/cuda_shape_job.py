"""A request for a CUDA kernel with symbolic sizes, on its way through the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.contract import contract_of, cubin_with
from eagercache.calls.numerics import CannotProve, ProofFailed, is_device_error
from eagercache.worker.compat import symbolic_shapes
from eagercache.worker.cuda import compile as cuda_compile
from eagercache.worker.cuda.open_sizes import CudaShapePlan
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused
from eagercache.worker.inductor.compile import Lowered, Tools
from eagercache.worker.inductor.shape_plan import Symbols
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.jobs.cuda_job import load_cubins
from eagercache.worker.jobs.outcome import Built, Outcome
from eagercache.worker.jobs.shape_job import ShapeJob, SizedPlan, with_symbols
from eagercache.worker.samples.shape_class import ShapeFamily, proof_values
from eagercache.worker.timing import timing
from eagercache.worker.timing.cuda_timing import CudaTiming, decide_cuda, time_cuda_call

if TYPE_CHECKING:
    from eagercache.calls.samples import Sample

FORM = "cuda_shapes"
# Elements of the largest tensor of the calls that a kernel is timed on, beside the request's own.
TIMED_ELEMENTS = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
# Sizes around these are tried: a warp's threads, and what the smallest blocks have.
_BLOCKS = [32, 128]


class CudaShapeJob(ShapeJob):
    """A job whose kernel answers a shape class on CUDA. Everything happens in `begin`."""

    _forms: tuple[str, ...] = (FORM,)
    _timed_elements = TIMED_ELEMENTS
    _made: CudaShapePlan | None = None
    _cubins: tuple[tuple[str, str], ...] = ()

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Any]) -> None:
        try:
            super()._begin(find_store, find_tools)
            if self.outcome is None:
                self._conclude(find_tools)
        except (CompileFailed, ProofFailed, CannotProve) as error:
            if getattr(error, "transient", False) or is_device_error(error):
                raise
            # A failure would keep kernels for exact sizes away, too, which may do.
            raise CompileRefused(f"no kernel with symbolic sizes: {error}") from error

    def _lower_shapes(self, family: ShapeFamily, tools: Tools) -> Lowered:
        fakes, environment, symbols = with_symbols(family)
        graph = self._symbolic_graph(family, fakes, symbols.names)

        def assumed() -> Symbols:
            guards = symbolic_shapes.assumptions(environment, symbols.names)
            return replace(symbols, guards=tuple(guards))

        own = self._native_strides(family, family.values)
        lowered, plan = cuda_compile.lower_open(
            family.call, len(own), graph, fakes, assumed, family.pattern
        )
        try:
            self._made = self._adopt_strides(family, plan)
        except NotUnderstood as error:
            raise CompileRefused(f"no kernel with symbolic sizes: {error}") from error
        self._cubins = self._write_cubins(self._made)
        return lowered

    def _adopt_strides(self, family: ShapeFamily, plan: CudaShapePlan) -> CudaShapePlan:
        """The plan with native's strides, as on a few members. Raises NotUnderstood."""
        if not plan.admits(family.values):
            raise NotUnderstood("guards that the call itself does not meet")
        # Strides that hold for the call alone may be a coincidence.
        others = proof_values(family, plan.admits, self._vector_lengths(family))[1:6]
        tried = [family.values, *others]
        return plan.with_strides([(v, self._native_strides(family, v)) for v in tried])

    def _write_cubins(self, plan: CudaShapePlan) -> tuple[tuple[str, str], ...]:
        assert self._directory is not None
        objects = []
        for index, cubin in enumerate(plan.cubins()):
            path = Path(self._directory) / f"sizes.{index}.cubin"
            made_for = contract_of(
                self.description["digest"], f"{FORM} {index}", plan.to_json([]), "", ()
            )
            path.write_bytes(cubin_with(cubin, made_for))
            objects.append(("cubin", str(path)))
        return tuple(objects)

    def _vector_lengths(self, family: ShapeFamily) -> list[int]:
        return _BLOCKS

    def _sized_of(self, lowered: Lowered) -> SizedPlan:
        assert self._made is not None
        return self._made

    def _built(self, choice: Sequence[tuple[int, bool]]) -> Built:
        assert self.lowered is not None
        return Built(self._cubins, self.lowered, FORM, self._sized_of(self.lowered).to_json(choice))

    def _load(self, probe: Any, kernel: Built) -> None:
        load_cubins(probe, kernel)

    def _prove_member(
        self, member: Call, kernel: Built, outcome: Outcome, where: str, others: int = 0
    ) -> None:
        super()._prove_member(member, kernel, outcome, where, others)
        torch.cuda.synchronize()

    def _time_captured(
        self, member: Call, probe: Any, sample: Sample, edge: float | None
    ) -> timing.Timing:
        return time_cuda_call(member, probe, sample)

    def _decide_member(self, measured: timing.Timing, margin: float) -> tuple[bool, str]:
        assert isinstance(measured, CudaTiming)
        return decide_cuda(measured, margin)
