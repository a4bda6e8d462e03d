"""The worker's half of accelerating a module's calls that need gradients.

As `compile`, with the backward beside the forward: the call runs watched, is traced with its
gradients and split (`joint_graph`), and two containers are compiled. They answer calls of the very
module through the node that the user's process puts into autograd's graph; the answer, every
gradient and every buffer are compared with what the module's own forward and autograd give.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagercache.callables import call_hooks
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_gradient import eager_gradients
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.outputs import building
from eagercache.callables.surroundings import (
    autocast,
    main_of,
)
from eagercache.calls.contract import are_of, module_contracts
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.graphs.dropout_masks import is_index
from eagercache.worker.graphs.indices import indexes
from eagercache.worker.graphs.nodes import coarsest_cast
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.modules.answers import time_answers
from eagercache.worker.modules.comparison import tensor_leaves
from eagercache.worker.modules.compile import ModuleResult, open_rows
from eagercache.worker.modules.facts import call_facts, kernel_facts
from eagercache.worker.modules.joint_graph import trace_training
from eagercache.worker.modules.proof import SEEDS, SPREADS
from eagercache.worker.modules.rebuilt_call import rebuilt_call
from eagercache.worker.modules.training_answers import TrainingAnswers
from eagercache.worker.modules.training_graphs import TrainingGraphs
from eagercache.worker.modules.training_proof import prove_training
from eagercache.worker.modules.training_watch import Watched, watch_training
from eagercache.worker.timing.gpu_memory import with_room


def compile_training(
    description: Mapping[str, Any],
    directory: Path,
    tools: Tools,
    core: Any,
    judge: Callable[..., ModuleResult] | None = None,
    made: Sequence[Path] = (),
) -> ModuleResult:
    """Makes and judges the kernels that a request describes; ``judge`` stands for `_judge`.

    Containers ``made`` elsewhere are judged instead, where they are of what is traced here.

    Raises CompileRefused (the forward stays, for good), ProofFailed, or CompileFailed.
    """
    open_sizes = [
        (int(tensor), int(dimension)) for tensor, dimension in description.get("open", ())
    ]
    with rebuilt_call(description, gradients=True) as rebuilt:
        rebuilt.require_gradients()
        seconds: dict[str, float] = {}
        with _clocked(seconds, "watch"), autocast(description["autocast"]):
            watched = watch_training(rebuilt, description["identity"])
        with (
            _clocked(seconds, "trace"),
            autocast(description["autocast"]),
            main_of(rebuilt.module, rebuilt.objects.found),
            call_hooks.originals(),
        ):
            graphs = trace_training(
                rebuilt.module,
                rebuilt.args,
                rebuilt.kwargs,
                watched.identity,
                watched.saves,
                watched.traced,
                watched.keeps_output,
                watched.strides,
                lambda graphs: saved_bytes(rebuilt, graphs) <= most_saved(watched),
                watched.opened,
                open_sizes,
            )
        graphs = replace(graphs, behind=watched.behind)
        rebuilt.rounded_to = coarsest_cast(graphs.forward.graph)
        if watched.draws != bool(graphs.noise or graphs.draws):
            raise CompileRefused("it draws random numbers that are no masks of dropout")
        _check_memory(rebuilt, watched, graphs)
        with _clocked(seconds, "containers"):
            contracts = _contracts(description, rebuilt, graphs, tools)
            if are_of(contracts, made):
                paths = made[0], made[1]
            else:
                paths = _compile(graphs, directory, tools, seconds, contracts)
        judge = judge or _judge
        return judge(rebuilt, watched, graphs, paths, core, seconds, description["autocast"])


@contextlib.contextmanager
def _clocked(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Notes what the block takes: the processor's time of this process, and the clock's."""
    own, wall = time.process_time(), time.monotonic()
    try:
        yield
    finally:
        seconds[step] = round(time.process_time() - own, 3)
        seconds[f"wall.{step}"] = round(time.monotonic() - wall, 3)


def _check_memory(rebuilt: Transferred, watched: Watched, graphs: TrainingGraphs) -> None:
    """Raises CompileRefused when more would be kept for the backward than may be."""
    ours = saved_bytes(rebuilt, graphs)
    if ours > most_saved(watched):
        raise CompileRefused(
            f"{ours} bytes would be kept for the backward, {watched.saved_bytes} are now"
            f"{graphs.largest_saved()}"
        )


def most_saved(watched: Watched) -> int:
    """What may be kept for the backward: as much as eager keeps, and a hundredth.

    A program's peak is more than that, so it rises by less. Without the hundredth one small tensor
    that eager computes again, or keeps in another dtype, would cost a whole model its kernel.
    """
    return watched.saved_bytes + watched.saved_bytes // 100


def saved_bytes(rebuilt: Transferred, graphs: TrainingGraphs) -> int:
    """Memory that a call keeps until its backward, less what is the module's own.

    Arguments are kept for gradients of gradients, but for those that are rebuilt; so are masks.
    """
    without = {one.argument for one in graphs.rebuilt}
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.numel() * tensor.element_size()
        for number, tensor in enumerate(argument_tensors(rebuilt.args, rebuilt.kwargs))
        if number not in without
    }
    return graphs.saved_bytes() + sum(memory.values())


# ---- compile -------------------------------------------------------------------------------------


def _contracts(
    description: Mapping[str, Any], rebuilt: Transferred, graphs: TrainingGraphs, tools: Tools
) -> list[str]:
    """What the two containers say of the request's entry (calls/contract.py)."""
    plan = graphs.plan()
    plan["buffers"] = [[index] for index in plan["buffers"]]
    plan["gradients"] = list(zip(plan["gradients"], plan["reach"], strict=True))
    facts = call_facts(form_of(graphs), graphs)
    if graphs.symbolic is not None:
        facts["sizes"] = json.dumps(open_rows(rebuilt, graphs))
    return module_contracts(description["digest"], facts, tools.cpu_features, plan)


def _compile(
    graphs: TrainingGraphs,
    directory: Path,
    tools: Tools,
    seconds: dict[str, float],
    contracts: Sequence[str],
) -> tuple[Path, Path]:
    texts: list[GeneratedText] = []

    def check(text: GeneratedText, inputs: int) -> None:
        texts.append(text)
        if text.uses_proxy_executor:
            raise CompileRefused(text.proxy_reason)
        if text.num_inputs != inputs:
            raise CompileRefused("the generated code takes another number of tensors")

    def check_forward(text: GeneratedText) -> None:
        check(text, len(graphs.examples))
        # Of what it indexes with all is known that no range says (`index_ranges`).
        known = graphs.ranges or any(map(is_index, graphs.noise)) or indexes(graphs.forward.graph)
        if text.checks_values and not known:
            raise CompileRefused("the generated code checks values")

    def check_backward(text: GeneratedText) -> None:
        check(text, len(graphs.backward_examples))

    # The forward's container says of open sizes what lowering both has assumed: it is the last.
    backward = ("backward", graphs.backward, graphs.backward_examples, check_backward, None)
    beside = graphs.symbolic.shape_function if graphs.symbolic is not None else None
    forward = ("forward", graphs.forward, graphs.examples, check_forward, beside)
    paths = []
    for contract, (name, graph, examples, checked, text) in zip(
        reversed(contracts), (backward, forward), strict=True
    ):
        folder = directory / name
        folder.mkdir()
        plain = tuple(example.detach() for example in examples)
        draws = bool(graphs.draws)
        paths.append(
            tools.container(
                graph,
                plain,
                folder,
                checked,
                text,
                improves=True,
                draws=draws,
                of_training=True,
                contract=contract,
            )
        )
        for step, value in tools.commands.seconds.items():
            seconds[f"{name}.{step}"] = value
    if all(not text.kernels for text in texts):
        raise CompileRefused("it is library calls alone: nothing to gain")
    return paths[1], paths[0]


# ---- prove and time ------------------------------------------------------------------------------


def _judge(
    rebuilt: Transferred,
    watched: Watched,
    graphs: TrainingGraphs,
    paths: tuple[Path, Path],
    core: Any,
    seconds: dict[str, float],
    under: Mapping[str, str],
) -> ModuleResult:
    with autocast(under):
        native = rebuilt.run()
    strides = [list(t.stride()) for t in tensor_leaves(native)]
    answers = TrainingAnswers(rebuilt, watched, graphs.noise or graphs.draws, core)
    with autocast(under, keeps_casts=False):
        answers.draw(SEEDS[0], SPREADS[0])
        plan = core_plan(watched, graphs, answers)
    core.set_eager_gradients(eager_gradients)
    core.set_modules_training(True)
    try:
        with autocast(under, keeps_casts=False):
            answers.put(load_training(paths, graphs, strides, plan, core))
            with _clocked(seconds, "prove"):
                numerics, error, native_error = with_room(
                    lambda: prove_training(answers, watched, rebuilt)
                )
            with _clocked(seconds, "time"):
                answers.draw(SEEDS[0], SPREADS[0])
                measured = time_answers(answers, graphs)
    finally:
        answers.close()
        core.set_modules_training(False)
    facts = training_facts(rebuilt, watched, graphs, strides, plan, (numerics, error, native_error))
    return ModuleResult(paths[0], facts, measured, seconds, more=(paths[1],))


def form_of(graphs: TrainingGraphs) -> str:
    """The form of the kernel's entry."""
    return "module-training" if graphs.symbolic is None else "module-training-sizes"


def load_training(
    paths: tuple[Path, Path],
    graphs: TrainingGraphs,
    strides: list[list[int]],
    plan: Mapping[str, Any],
    core: Any,
) -> Any:
    """The core's kernel out of the two containers."""
    return core.load_module(
        [*map(str, paths)],
        str(graphs.device),
        graphs.inputs,
        graphs.ranges,
        strides,
        plan=plan,
        **building(graphs.outputs, len(strides)),
    )


def training_facts(
    rebuilt: Transferred,
    watched: Watched,
    graphs: TrainingGraphs,
    strides: list[list[int]],
    plan: Mapping[str, Any],
    proved: tuple[str, float, float],
) -> dict[str, str]:
    """What the entry says. ``proved``: as `prove_training` gives it."""
    numerics, *errors = proved
    named = (errors[0], errors[1])
    return {
        **kernel_facts(form_of(graphs), graphs, strides, watched.functions, numerics, named),
        "training": json.dumps(plan, separators=(",", ":")),
        "saved_bytes": str(saved_bytes(rebuilt, graphs)),
        "native_saved_bytes": str(watched.saved_bytes),
    }


def core_plan(watched: Watched, graphs: TrainingGraphs, answers: TrainingAnswers) -> dict[str, Any]:
    """What `read_training_plan` of nn_modules/training/training_plan.cc reads."""
    plan = graphs.plan()
    steps = watched.version_steps
    written = {graphs.inputs[index][1] for index in plan["buffers"]}
    if not set(steps) <= written:
        raise ProofFailed("a buffer is written that the traced graph does not write")
    strides = answers.gradient_strides()
    rows = []
    for index, tangents in zip(plan["gradients"], plan["reach"], strict=True):
        layout = strides.get(answers.input_id(graphs.inputs[index]))
        if layout is None:
            raise ProofFailed("the traced graph has a gradient that the forward has not")
        rows.append([index, tangents, layout])
    return {
        "identity": watched.identity.digest,
        "keeps_output": watched.keeps_output,
        "views": [list(view) for view in watched.views],
        "buffers": [
            [index, steps.get(graphs.inputs[index][1], 0), is_read]
            for index, is_read in zip(plan["buffers"], graphs.buffers_read, strict=True)
        ],
        "saved": plan["saved"],
        "tangents": plan["tangents"],
        "gradients": rows,
        "rebuilt": plan["rebuilt"],
        "noise": plan["noise"],
        "draws": plan["draws"],
        **{name: plan[name] for name in ("open", "redraws") if name in plan},
    }
