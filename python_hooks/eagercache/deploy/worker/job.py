"""The worker's half of an artifact: run, trace, fold, compile, prove.

As for a kernel of a module (worker/modules/compile.py), but that the answer comes from a deployed
program, the very object that loads an artifact, whose constants are updated with every draw of the
proof.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagercache.callables import call_hooks
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.outputs import build_unflatten
from eagercache.callables.surroundings import autocast, main_of
from eagercache.calls.storage import is_dense
from eagercache.deploy.layout import (
    CannotDeploy,
    constant_rows,
    describe_call,
    form_of,
    input_names,
    output_names,
    program_text,
)
from eagercache.deploy.worker.fold import Split, split_weights
from eagercache.worker.graphs.indices import indexes
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.outcome import Outcome
from eagercache.worker.modules.answers import Answers, time_answers
from eagercache.worker.modules.comparison import tensor_leaves
from eagercache.worker.modules.compile import watch_forward
from eagercache.worker.modules.proof import prove_calls
from eagercache.worker.modules.rebuilt_call import rebuilt_call
from eagercache.worker.modules.trace import ModuleGraph, trace_module
from eagercache.worker.timing.gpu_memory import with_room

# Values of all open sizes at which the program is compared with the forward, where it holds.
SIZES_TRIED = (2, 3, 5, 8, 16, 17, 33)


class DeployJob(Job):
    """One module's call, compiled into a folder. Nothing is published."""

    def __init__(self, request: Mapping[str, Any], core: Any) -> None:
        super().__init__(request, core)
        self._made: dict[str, Any] | None = None

    def _begin(self, find_store: Any, find_tools: Any) -> None:
        self.store = store = find_store()
        self._directory = Path(store.make_work_directory())
        tools = find_tools(store)
        output = Path(self.request["output"])
        try:
            with self.clock.step("deploy"):
                self._made = compile_deployed(
                    self.description, self._directory, tools, self._core, output
                )
        finally:
            tools.rest()
        self.outcome = Outcome("kernel")

    def finish(self) -> dict[str, Any]:
        """The response; "deployed" has what was made."""
        return {**super().finish(), "deployed": self._made}


def compile_deployed(
    description: Mapping[str, Any], directory: Path, tools: Tools, core: Any, output: Path
) -> dict[str, Any]:
    """Makes the libraries of a module in ``output``; what is known of them.

    Raises CompileRefused, ProofFailed or CompileFailed.
    """
    casts = description["autocast"]
    open_sizes = [(int(tensor), int(dimension)) for tensor, dimension in description["open"]]
    with rebuilt_call(description) as rebuilt:
        if rebuilt.objects.found:
            raise CompileRefused("an argument of the call is an object, which no artifact takes")
        with autocast(casts):
            identity, _ = watch_forward(rebuilt, description["identity"])
        if rebuilt.objects.stores is not None:
            raise CompileRefused("it assigns to attributes of its own, which no artifact does")
        if rebuilt.writes:
            raise CompileRefused("it writes into its buffers, which no artifact does")
        with autocast(casts), main_of(rebuilt.module), call_hooks.originals():
            traced = trace_module(rebuilt, identity, open_sizes)
        if any("detached" in leaf for leaf in json.loads(traced.outputs)["leaves"]):
            raise CompileRefused("it returns one tensor twice, which no artifact does")
        if traced.noise:
            raise CompileRefused("it draws random numbers, which no artifact does")
        if traced.checks:
            raise CompileRefused("it computes what it indexes with, which no artifact checks")
        _require_open(traced, open_sizes)
        split = split_weights(traced, [slot.tensor for slot in identity.slots])
        libraries = _compile(split, traced, directory, tools, output)
        with autocast(casts, keeps_casts=False):
            layout = _layout(rebuilt, identity, traced, split)
            answers = DeployedAnswers(
                rebuilt, identity, core, layout, libraries, description["gpu"]
            )
            numerics, error, native_error = with_room(
                lambda: prove_calls(rebuilt, answers, identity)
            )
            proved = _prove_sizes(rebuilt, identity, answers, traced)
            rebuilt.draw(seed=0)
            answers.by_kernel()
            timing = time_answers(answers, traced)
    return {
        "layout": layout,
        "libraries": [str(path) for path in libraries],
        "numerics": numerics,
        "largest_error": error,
        "native_error": native_error,
        "native_ns": timing.native_ns,
        "kernel_ns": timing.kernel_ns,
        "proved_sizes": proved,
    }


def _require_open(traced: ModuleGraph, wanted: list[tuple[int, int]]) -> None:
    stayed = traced.symbolic.open_sizes if traced.symbolic is not None else ()
    for tensor, dimension in wanted:
        if (tensor, dimension) not in stayed:
            raise CompileRefused(
                f"the forward is another program for each size of dimension {dimension} of "
                f"argument tensor {tensor}, which was to be open"
            )


def _compile(
    split: Split, traced: ModuleGraph, directory: Path, tools: Tools, output: Path
) -> list[Path]:
    def check(text: GeneratedText) -> None:
        if text.uses_proxy_executor:
            raise CompileRefused(text.proxy_reason)
        if text.checks_values and not traced.ranges and not indexes(traced.graph.graph):
            raise CompileRefused("the generated code checks values")

    beside = traced.symbolic.shape_function if traced.symbolic is not None else None
    graphs = [("main", split.main, split.examples, beside)]
    if split.fold is not None:
        graphs.append(("fold", split.fold, split.fold_examples, None))
    libraries = []
    for name, graph, examples, more in graphs:
        folder = directory / name
        folder.mkdir()
        made = tools.container(graph, examples, folder, check, more)
        libraries.append(Path(shutil.copyfile(made, output / f"{name}.so")))
    return libraries


def _layout(
    rebuilt: Transferred, identity: Identity, traced: ModuleGraph, split: Split
) -> dict[str, Any]:
    """What `program_text` makes a program of, and what stands at its ends."""
    answer = rebuilt.module(*rebuilt.args, **rebuilt.kwargs)
    arguments = argument_tensors(rebuilt.args, rebuilt.kwargs)
    try:
        names = input_names(rebuilt.module, rebuilt.args, rebuilt.kwargs)
        in_spec = describe_call(rebuilt.args, rebuilt.kwargs)
    except CannotDeploy as error:
        raise CompileRefused(str(error)) from error
    if any(tensor.numel() == 0 for tensor in (*arguments, *tensor_leaves(answer))):
        raise CompileRefused("an argument or an output is empty")
    open_inputs = {tensor for tensor, _ in traced.symbolic.open_sizes} if traced.symbolic else set()
    for index in open_inputs:
        argument = arguments[index]
        if torch._debug_has_internal_overlap(argument) != 0 or not is_dense(argument):
            raise CompileRefused("an argument with open sizes is not dense")
    ranges = []
    for position, low, high, also in traced.ranges:
        if also != low:
            raise CompileRefused("it indexes with labels, of which it skips one number")
        of_module, index = traced.inputs[position]
        ranges.append(["slot" if of_module else "argument", index, low, high])
    return {
        "inputs": [
            {"name": name, "form": form_of(tensor)}
            for name, tensor in zip(names, arguments, strict=True)
        ],
        "outputs": [
            {"name": name, "form": form_of(tensor)}
            for name, tensor in zip(output_names(answer), tensor_leaves(answer), strict=True)
        ],
        "main": [[source.kind, source.index] for source in split.sources],
        "fold_slots": list(split.fold_slots),
        "folded": [form_of(tensor) for tensor in split.folded],
        "ranges": ranges,
        "open": [list(place) for place in traced.symbolic.open_sizes] if traced.symbolic else [],
        "in_spec": in_spec,
        "out_spec": traced.outputs,
    }


class DeployedAnswers(Answers):
    """Calls the module through a deployed program or through its forward."""

    def __init__(
        self,
        rebuilt: Transferred,
        identity: Identity,
        core: Any,
        layout: Mapping[str, Any],
        libraries: list[Path],
        gpu: str,
    ) -> None:
        super().__init__(rebuilt, identity, core)
        self.store_error = core.StoreError
        rows, places, self._tensors = constant_rows(identity, layout["folded"])
        self._names = [row[0][0] for row in rows[: len(self._tensors)]]
        values = [*self._tensors, *[None] * len(layout["folded"])]
        text = program_text(layout, places, len(self._tensors))
        self.program = core.DeployedProgram.make(
            text, rows, values, [str(path) for path in libraries], runners=1, gpu=gpu
        )
        self._unflatten = build_unflatten(layout["out_spec"], len(layout["outputs"]))

    def by_kernel(self) -> Any:
        """The program's answer, with the tensors that the module has now."""
        self.program.update(
            dict(zip(self._names, self._tensors, strict=True)),
            inactive=True,
            whole=True,
            keep=False,
        )
        self.program.swap()
        return self._answer()

    def by_forward(self) -> Any:
        """The forward's answer."""
        return self._rebuilt.module(*self._rebuilt.args, **self._rebuilt.kwargs)

    def run(self, by_kernel: bool, calls: int) -> None:
        """Makes calls whose answers nobody waits for."""
        call = self._answer if by_kernel else self.by_forward
        for _ in range(calls):
            call()

    def _answer(self) -> Any:
        tensors = argument_tensors(self._rebuilt.args, self._rebuilt.kwargs)
        outputs, _ = self.program.run(tensors)
        return outputs[0] if self._unflatten is None else self._unflatten(outputs)


def _prove_sizes(
    rebuilt: Transferred, identity: Identity, answers: DeployedAnswers, traced: ModuleGraph
) -> list[int]:
    """The sizes of `SIZES_TRIED` at which the program holds and answers as the forward does."""
    if traced.symbolic is None:
        return []
    arguments = argument_tensors(rebuilt.args, rebuilt.kwargs)
    held = []
    for size in SIZES_TRIED:
        sizes = {tensor: list(arguments[tensor].size()) for tensor, _ in traced.symbolic.open_sizes}
        for tensor, dimension in traced.symbolic.open_sizes:
            sizes[tensor][dimension] = size
        if all(sizes[tensor] == list(arguments[tensor].size()) for tensor in sizes):
            continue  # the call that was proved already
        member = rebuilt.resized(sizes)
        answers.use(member)
        try:
            answers.by_kernel()
        except answers.store_error as error:
            if error.code != "invalid_argument":
                raise
            continue
        prove_calls(member, answers, identity, draws=((0, 1.0),))
        held.append(size)
    answers.use(rebuilt)
    if not held:
        raise CompileRefused(
            "the forward is another program for each of the sizes that were to be open"
        )
    return held
