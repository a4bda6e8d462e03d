"""A request for a CUDA kernel that takes numbers of the call as arguments, through the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.contract import contract_of, cubin_with
from eagercache.calls.numerics import CannotProve, ProofFailed, is_device_error
from eagercache.worker.cuda import compile as cuda_compile
from eagercache.worker.cuda.plan import CudaPlan
from eagercache.worker.inductor.call_graph import build_graph
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused
from eagercache.worker.inductor.compile import Lowered, Tools
from eagercache.worker.jobs.cuda_job import load_cubins
from eagercache.worker.jobs.outcome import Built, Outcome
from eagercache.worker.jobs.scalar_job import ScalarJob
from eagercache.worker.samples.draws import SEED
from eagercache.worker.samples.scalar_class import ScalarFamily
from eagercache.worker.timing import timing
from eagercache.worker.timing.cuda_timing import CudaTiming, decide_cuda, time_cuda_call
from eagercache.worker.validation import validate

FORM = "cuda_scalars"


class CudaScalarJob(ScalarJob):
    """A job whose kernel answers a scalar class on CUDA. Everything happens in `begin`."""

    _forms: tuple[str, ...] = (FORM,)
    _made: CudaPlan | None = None
    _cubins: tuple[tuple[str, str], ...] = ()

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Any]) -> None:
        try:
            super()._begin(find_store, find_tools)
            if self.outcome is None:
                self._conclude(find_tools)
        except (CompileFailed, ProofFailed, CannotProve) as error:
            if getattr(error, "transient", False) or is_device_error(error):
                raise
            # A failure would keep kernels for exact numbers away, too, which may do.
            raise CompileRefused(f"no kernel with numbers as arguments: {error}") from error

    def _lower_marked(self, family: ScalarFamily, num_returns: int, tools: Tools) -> Lowered:
        def graph_of(numbers: Sequence[float]) -> torch.fx.GraphModule:
            return build_graph(family.member(numbers), num_returns)

        lowered, self._made = cuda_compile.lower_scalars(
            family.call, num_returns, graph_of, self._marks(family)
        )
        written = set(self._made.writes)
        own = family.call.written
        if bool(written) != bool(own) or not own.issuperset(written):
            raise CompileRefused("the generated code writes other arguments than the operator")
        return lowered

    def _adopt(self, outputs: Sequence[torch.Tensor]) -> None:
        assert self._made is not None and self._directory is not None and self._family is not None
        call = self._family.call
        fresh = call.fresh if len(call.op._schema.returns) > 1 else range(len(outputs))
        self._made = self._made.with_strides([list(outputs[i].stride()) for i in fresh])
        objects, text = [], self._made.to_json()
        for index, cubin in enumerate(self._made.cubins()):
            path = Path(self._directory) / f"numbers.{index}.cubin"
            made_for = contract_of(self.description["digest"], f"{FORM} {index}", text, "", ())
            path.write_bytes(cubin_with(cubin, made_for))
            objects.append(("cubin", str(path)))
        self._cubins = tuple(objects)

    def _built(self) -> Built:
        assert self.lowered is not None and self._made is not None
        return Built(self._cubins, self.lowered, FORM, launch_plan=self._made.to_json())

    def _load(self, probe: Any, kernel: Built) -> None:
        load_cubins(probe, kernel)

    def _prove_member(
        self, member: Call, kernel: Built, outcome: Outcome, where: str, others: int = 0
    ) -> None:
        super()._prove_member(member, kernel, outcome, where, others)
        torch.cuda.synchronize()

    def _time_own(self, family: ScalarFamily, kernel: Built, outcome: Outcome) -> None:
        probe = self._probe()
        sample = family.call.sample("unit", SEED)
        validate.capture(family.call, probe, sample, self.request["choose"])
        self._load(probe, kernel)
        with timing.machine_to_itself(), self.clock.step("time"):
            outcome.timing = time_cuda_call(family.call, probe, sample)

    def _decide(self, outcome: Outcome) -> None:
        assert isinstance(outcome.timing, CudaTiming)
        faster, outcome.reason = decide_cuda(outcome.timing, float(self.request["margin"]))
        if not faster and self.request["choose"] != "always":
            outcome.verdict = "native"
