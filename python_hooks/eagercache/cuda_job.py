"""A request for a CUDA kernel on its way through the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import cuda_compile, prove, timing
from .calls import Call
from .commands import CompileRefused
from .compile import Tools
from .cuda_compile import CudaLowered
from .cuda_plan import CudaPlan
from .cuda_timing import decide_cuda, time_cuda_call
from .job import Built, Job, Outcome
from .prove import NotBitwise, ProofFailed, Reshaped


class CudaJob(Job):
    """One operator call on CUDA. Everything happens in `begin`: nothing is built with others.

    The worker's device 0 stands for the one that the call was made on.
    """

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        store = self._enter(find_store)
        if self.outcome is not None:
            return
        find_tools(store)  # gives Inductor and Triton their private folders
        call = self._open()
        self._refuse_denied(call)
        with call.state.applied():
            graph = self._trace(call)
            with self.clock.step("native"):
                try:
                    natives, probe = self._rebuild(call)
                except Reshaped as reshaped:
                    raise CompileRefused(str(reshaped)) from reshaped
            with self.clock.step("compile"):
                made = cuda_compile.lower(call, len(natives[0].outputs), graph)
            self.lowered = made.lowered
            written = set(made.plan.writes)
            if bool(written) != bool(call.written) or not call.written.issuperset(written):
                raise CompileRefused("the generated code writes other arguments than the operator")
            plan = made.plan.with_strides(self._strides(call, natives[0].outputs))
            outcome = Outcome("kernel", kernel=self._built(made, plan))
            with self.clock.step("prove"):
                try:
                    probe.load_cubins(plan.cubins(), plan.to_json())
                except RuntimeError as error:
                    raise ProofFailed(f"the kernel does not load: {error}") from error
                try:
                    outcome.proof = prove.prove(
                        call,
                        probe,
                        natives,
                        reduces=made.lowered.text.reduces,
                        approximates=made.lowered.text.approximates,
                        composed=self._composed,
                    )
                except NotBitwise as differs:
                    raise CompileRefused(str(differs)) from differs
                torch.cuda.synchronize()
            with timing.machine_to_itself(), self.clock.step("time"):
                measured = time_cuda_call(call, probe, natives[0].sample)
        outcome.timing = measured
        faster, outcome.reason = decide_cuda(measured, float(self.request["margin"]))
        if not faster and self.request["choose"] != "always":
            outcome.verdict = "native"
        self.outcome = outcome

    def _strides(self, call: Call, outputs: Sequence[torch.Tensor]) -> list[list[int]]:
        """Native's, of what the operator makes anew."""
        fresh = call.fresh if len(call.op._schema.returns) > 1 else range(len(outputs))
        return [list(outputs[index].stride()) for index in fresh]

    def _built(self, made: CudaLowered, plan: CudaPlan) -> Built:
        assert self._directory is not None
        objects = []
        for index, cubin in enumerate(plan.cubins()):
            path = self._directory / f"{index}.cubin"
            path.write_bytes(cubin)
            objects.append(("cubin", str(path)))
        return Built(tuple(objects), made.lowered, "cuda", launch_plan=plan.to_json())
