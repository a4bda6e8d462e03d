"""The worker's half of accelerating a module's calls that need gradients.

As `module_compile`, with the backward beside the forward: the call runs watched, is traced with its
gradients and split (`module_joint`), and two containers are compiled. They answer calls of the very
module through the node that the user's process puts into autograd's graph; the answer, every
gradient and every buffer are compared with what the module's own forward and autograd give.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables import call_hooks
from eagercache.callables.answer_structure import (
    holds_objects,
    in_objects,
    lasting_part,
    outcome_of,
    structure_of,
    take,
)
from eagercache.callables.answers import compare_structure
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_gradient import eager_gradients
from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.module_transfer import Transferred, unpacked
from eagercache.callables.objects import CallObjects
from eagercache.callables.outputs import build_unflatten, takes_objects
from eagercache.callables.replay import Replayed
from eagercache.callables.surroundings import (
    Listener,
    attention_order,
    autocast,
    drawing_from,
    main_of,
    random_states,
    torch_states,
)
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.calls.contract import module_contracts
from eagercache.calls.description import decode_state
from eagercache.calls.numerics import ProofFailed, same_bits
from eagercache.worker.graphs.dropout_masks import Draw
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.modules.comparison import Moved, compare
from eagercache.worker.modules.compile import (
    MAX_FUNCTIONS,
    SEEDS,
    SPREADS,
    Answers,
    ModuleResult,
    call_facts,
    equal_answers,
    kernel_facts,
    read_beside,
    refuse_shared,
    tensor_leaves,
    time_answers,
    wide,
)
from eagercache.worker.modules.joint_graph import OpenedAnswer, trace_training
from eagercache.worker.modules.reads import Reads, check_names
from eagercache.worker.modules.training_graphs import TrainingGraphs


@dataclass(frozen=True)
class _Watched:
    """What the module's own forward and autograd did."""

    identity: Identity
    functions: list[list[str]]
    differentiable: list[bool]  # by tensor of the answer
    saves: set[int]  # addresses of the memory that is kept for the backward
    saved_bytes: int  # of it, what is not the module's own
    keeps_output: list[bool]
    strides: list[list[int]]  # of the answer's tensors
    opened: OpenedAnswer | None  # where the answer holds objects
    version_steps: dict[int, int]  # by slot: how far a written buffer's version moved
    draws: bool  # random numbers, of torch's own generators


def compile_training(
    description: Mapping[str, Any], directory: Path, tools: Tools, core: Any
) -> ModuleResult:
    """Makes and judges the kernels that a request describes.

    Raises CompileRefused (the forward stays, for good), ProofFailed, or CompileFailed.
    """
    for path in description["python_path"]:
        if path not in sys.path:
            sys.path.append(path)
    with (
        decode_state(description).applied(),
        attention_order(description.get("attention")),
        torch.enable_grad(),
        unpacked(description["payload"]) as rebuilt,
    ):
        rebuilt.require_gradients()
        seconds: dict[str, float] = {}
        with _clocked(seconds, "watch"), autocast(description["autocast"]):
            watched = _watch(rebuilt, description["identity"])
        with (
            _clocked(seconds, "trace"),
            autocast(description["autocast"]),
            main_of(rebuilt.module),
            call_hooks.originals(),
        ):
            graphs = trace_training(
                rebuilt.module,
                rebuilt.args,
                rebuilt.kwargs,
                watched.identity,
                watched.saves,
                watched.differentiable,
                watched.keeps_output,
                watched.strides,
                watched.opened,
            )
        if watched.draws != bool(graphs.noise or graphs.draws):
            raise CompileRefused("it draws random numbers that are no masks of dropout")
        _check_memory(rebuilt, watched, graphs)
        with _clocked(seconds, "containers"):
            contracts = _contracts(description, graphs, tools)
            paths = _compile(graphs, directory, tools, seconds, contracts)
        return _judge(rebuilt, watched, graphs, paths, core, seconds, description["autocast"])


@contextlib.contextmanager
def _clocked(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Notes what the block takes: the processor's time of this process, and the clock's."""
    own, wall = time.process_time(), time.monotonic()
    try:
        yield
    finally:
        seconds[step] = round(time.process_time() - own, 3)
        seconds[f"wall.{step}"] = round(time.monotonic() - wall, 3)


# ---- the forward, watched ------------------------------------------------------------------------


def _watch(rebuilt: Transferred, expected: str) -> _Watched:
    """Runs the forward. Raises CompileRefused when it does more than compute and write buffers."""
    try:
        return _observe(rebuilt, expected)
    except Unfit as error:
        raise CompileRefused(str(error)) from error


def _observe(rebuilt: Transferred, expected: str) -> _Watched:
    module = rebuilt.module
    identity = identify(module)
    if identity.digest != expected:
        raise Unfit("its attributes change, or cannot be rebuilt in another process")
    with Reads(gradients=True) as reads:
        module(*rebuilt.args, **rebuilt.kwargs)  # what a first call sets up is not its effect
    reads.check()
    rebuilt.draw(seed=0)
    before = [slot.tensor.detach().clone() for slot in identity.slots]
    versions = [slot.tensor._version for slot in identity.slots]
    arguments = argument_tensors(rebuilt.args, rebuilt.kwargs)
    given = [tensor.detach().clone() for tensor in arguments]
    output, errors = Listener(), Listener()
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with drawing_from(0):
        states = torch_states(), random_states()
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            FunctionRecorder() as recorder,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            answer = module(*rebuilt.args, **rebuilt.kwargs)
        draws = torch_states() != states[0]
        if not draws and random_states() != states[1]:
            raise Unfit("it draws random numbers")
    first = outcome_of(answer, rebuilt.objects)
    check_names(recorder, rebuilt.attributes)
    if output.wrote or errors.wrote:
        raise Unfit("it prints")
    recorder.check_effects()
    if identify(module).digest != expected:
        raise Unfit("it changes attributes of its own")
    if any(not same_bits(a, b.detach()) for a, b in zip(given, arguments, strict=True)):
        raise Unfit("it writes to its arguments")
    steps = _written(identity, before, versions)
    after = [slot.tensor.detach().clone() for slot in identity.slots]
    _restore(identity, before)
    with drawing_from(0):
        another = module(*rebuilt.args, **rebuilt.kwargs)
    opened = _opened(answer, another, rebuilt)
    if not equal_answers(_detached(first), _detached(outcome_of(another, rebuilt.objects))):
        raise Unfit("its answers differ from run to run")
    if any(not same_bits(a, s.tensor.detach()) for a, s in zip(after, identity.slots, strict=True)):
        raise Unfit("what it writes differs from run to run")
    _restore(identity, before)
    functions = read_beside(recorder, module)
    if len(functions) > MAX_FUNCTIONS:
        raise Unfit("its forward runs too many different functions")
    own = [slot.tensor for slot in identity.slots]
    refuse_shared(first, [*own, *arguments])
    if any(leaf.storage_offset() != 0 for leaf in tensor_leaves(first)):
        raise Unfit("it returns a view into a larger tensor")
    memory = {tensor.untyped_storage().data_ptr() for tensor in own}
    leaves = tensor_leaves(first)
    differentiable = [leaf.requires_grad for leaf in leaves]
    held = [False] * len(leaves) if opened is None else opened.in_objects
    if not any(has and not inside for has, inside in zip(differentiable, held, strict=True)):
        raise Unfit("nothing that it returns has a gradient")
    return _Watched(
        identity=identity,
        functions=functions,
        differentiable=differentiable,
        saves=set(saved),
        saved_bytes=sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in memory),
        keeps_output=[leaf.untyped_storage().data_ptr() in saved for leaf in leaves],
        strides=[list(leaf.stride()) for leaf in leaves],
        opened=opened,
        version_steps=steps,
        draws=draws,
    )


def _opened(answer: Any, another: Any, rebuilt: Transferred) -> OpenedAnswer | None:
    """What there is to know of an answer with objects; ``another`` one of the same call."""
    if not holds_objects(answer):
        return None
    if rebuilt.objects.found:
        raise Unfit("it is called with an object")
    lasting = lasting_part(answer, another, ())
    if lasting is not None:
        raise Unfit(f"it returns a {type(lasting).__name__}, which outlives the call")
    structure = structure_of(answer, ())
    leaves: list[Any] = []
    take(structure, answer, leaves)
    held = [
        inside
        for leaf, inside in zip(leaves, in_objects(structure), strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    return OpenedAnswer(answer, structure, held)


def _written(
    identity: Identity, before: Sequence[torch.Tensor], versions: Sequence[int]
) -> dict[int, int]:
    """The slots that were written, with how far their versions moved."""
    steps = {}
    for index, (slot, value, version) in enumerate(
        zip(identity.slots, before, versions, strict=True)
    ):
        moved = slot.tensor._version - version
        if moved == 0 and same_bits(value, slot.tensor.detach()):
            continue
        if slot.kind != "buffer":
            raise Unfit(f"it writes to its {slot.kind} {slot.full_name}")
        steps[index] = moved
    return steps


def _restore(identity: Identity, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for slot, value in zip(identity.slots, values, strict=True):
            if not same_bits(slot.tensor.detach(), value):
                slot.tensor.copy_(value)


def _detached(answer: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), answer)


def _check_memory(rebuilt: Transferred, watched: _Watched, graphs: TrainingGraphs) -> None:
    """Raises CompileRefused when more would be kept for the backward than eager keeps."""
    ours = saved_bytes(rebuilt, graphs)
    if ours > watched.saved_bytes:
        raise CompileRefused(
            f"{ours} bytes would be kept for the backward, {watched.saved_bytes} are now"
        )


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
    outputs = sum(
        example.numel() * example.element_size()
        for source, example in zip(graphs.saved, graphs.backward_examples, strict=False)
        if source.kind == "output"
    )
    masks = sum(
        example.numel() * example.element_size()
        for example in graphs.examples[len(graphs.inputs) :]
    )
    return graphs.made_bytes + outputs + masks + sum(memory.values())


# ---- compile -------------------------------------------------------------------------------------


def _contracts(description: Mapping[str, Any], graphs: TrainingGraphs, tools: Tools) -> list[str]:
    """What the two containers say of the request's entry (calls/contract.py)."""
    plan = graphs.plan()
    plan["buffers"] = [[index] for index in plan["buffers"]]
    plan["gradients"] = list(zip(plan["gradients"], plan["reach"], strict=True))
    facts = call_facts("module-training", graphs)
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
            raise CompileRefused("the generated code needs the proxy executor")
        if text.num_inputs != inputs:
            raise CompileRefused("the generated code takes another number of tensors")

    def check_forward(text: GeneratedText) -> None:
        check(text, len(graphs.examples))
        if text.checks_values and not graphs.ranges:
            raise CompileRefused("the generated code checks values")

    paths = []
    for contract, (name, graph, examples, checked) in zip(
        contracts,
        (
            ("forward", graphs.forward, graphs.examples, check_forward),
            (
                "backward",
                graphs.backward,
                graphs.backward_examples,
                lambda text: check(text, len(graphs.backward_examples)),
            ),
        ),
        strict=True,
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
                improves=True,
                draws=draws,
                contract=contract,
            )
        )
        for step, value in tools.commands.seconds.items():
            seconds[f"{name}.{step}"] = value
    if all(not text.kernels for text in texts):
        raise CompileRefused("it is library calls alone: nothing to gain")
    return paths[0], paths[1]


# ---- prove and time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What one call and its backward gave."""

    answer: Any
    gradients: list[torch.Tensor | None]  # of the wanted tensors
    buffers: list[torch.Tensor]
    versions: list[int]
    drawn: list[Any]  # what torch's generators were at after the call


class _TrainingAnswers(Answers):
    """Calls the module, and asks for its gradients, through the kernels or through autograd."""

    def __init__(
        self,
        rebuilt: Transferred,
        watched: _Watched,
        noise: Sequence[Draw],
        core: Any,
    ) -> None:
        super().__init__(rebuilt, watched.identity, core)
        self._watched, self._noise = watched, noise
        self._seed = 0  # of the masks of every call, and of its reference
        slots = watched.identity.slots
        self._wanted = [
            tensor
            for tensor in dict.fromkeys(
                [
                    *(slot.tensor for slot in slots),
                    *argument_tensors(rebuilt.args, rebuilt.kwargs),
                ]
            )
            if tensor.requires_grad
        ]
        self._written = [slots[index].tensor for index in sorted(watched.version_steps)]
        self._tangents: list[torch.Tensor] = []
        held = watched.opened.in_objects if watched.opened is not None else ()
        inside = [
            held[output] if held else False
            for output, needed in enumerate(watched.differentiable)
            if needed
        ]
        # Places among the outputs with a gradient: those that have one in each backward, and those
        # in objects.
        self._asked = [place for place, is_inside in enumerate(inside) if not is_inside]
        self._in_objects = [place for place, is_inside in enumerate(inside) if is_inside]

    def alone(self) -> list[int]:
        """The outputs whose gradients are proved one by one: few of those in objects."""
        asked = self._asked if len(self._asked) + len(self._in_objects) > 1 else []
        return [*asked, *dict.fromkeys([*self._in_objects[:1], *self._in_objects[-1:]])]

    def draw(self, seed: int, spread: float) -> None:
        """Other values for everything that a call is given, and for the gradients of its answer."""
        self._seed = seed
        self._rebuilt.draw(seed, spread)
        with torch.no_grad():
            leaves = tensor_leaves(self.by_forward())
        self._rebuilt.draw(seed, spread)
        generator = torch.Generator(leaves[0].device).manual_seed(seed)
        self._tangents = [
            torch.randn(
                leaf.size(), generator=generator, device=leaf.device, dtype=torch.float32
            ).to(leaf.dtype)
            for leaf, needed in zip(leaves, self._watched.differentiable, strict=True)
            if needed
        ]

    def gradient_strides(self) -> dict[int, list[int]]:
        """The strides of autograd's own gradients, by the identity of the tensor."""
        gradients = self.call(by_kernel=False).gradients
        return {
            id(tensor): list(gradient.stride())
            for tensor, gradient in zip(self._wanted, gradients, strict=True)
            if gradient is not None
        }

    def call(self, by_kernel: bool, only: int | None = None) -> _Run:
        """One call and its backward. ``only``: the one output whose gradient is defined.

        Without it those of all outputs that are in no object.
        """
        kept = [tensor.clone() for tensor in self._written]
        versions = [tensor._version for tensor in self._written]
        with drawing_from(self._seed):
            answer = self.by_kernel() if by_kernel else self.by_forward()
            drawn = torch_states() if self._noise else []
        after = [tensor.clone() for tensor in self._written]
        moved = [t._version - v for t, v in zip(self._written, versions, strict=True)]
        gradients = self._gradients(answer, self._tangents, self._wanted, only)
        with torch.no_grad():
            for tensor, value in zip(self._written, kept, strict=True):
                tensor.copy_(value)
        return _Run(answer, gradients, after, moved, drawn)

    def _gradients(
        self,
        answer: Any,
        tangents: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        only: int | None,
    ) -> list[torch.Tensor | None]:
        outputs = [leaf for leaf in self._leaves(answer) if leaf.requires_grad]
        if len(outputs) != len(tangents):
            raise ProofFailed("another number of outputs has gradients")
        chosen = self._asked if only is None else [only]
        return list(
            torch.autograd.grad(
                [outputs[i] for i in chosen],
                wanted,
                [tangents[i] for i in chosen],
                allow_unused=True,
            )
        )

    def _leaves(self, answer: Any) -> list[torch.Tensor]:
        """The tensors of an answer, or of what `outcome_of` makes of it."""
        opened = self._watched.opened
        if opened is None or (isinstance(answer, tuple) and type(answer[0]) is str):
            return tensor_leaves(answer)
        leaves: list[Any] = []
        take(opened.structure, answer, leaves)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def reference(self, only: int | None = None) -> _Run:
        """What a float64 copy gives."""
        try:
            with (
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False),
                self.forward_alone(),
            ):
                return self._reference(only)
        except ProofFailed:
            raise
        except Exception as error:
            raise ProofFailed("not equal bit for bit, and there is no wider reference") from error

    def _reference(self, only: int | None) -> _Run:
        rebuilt = self._rebuilt
        copies: dict[int, torch.Tensor] = {}

        def widen(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            made = wide(value)
            if made is not value and value.requires_grad:
                made.requires_grad_()
            copies[id(value)] = made
            return made

        module = copy.deepcopy(rebuilt.module).double()
        own = identify(module)
        for mine, slot in zip(self._identity.slots, own.slots, strict=True):
            copies[id(mine.tensor)] = slot.tensor
        args, kwargs = pytree.tree_map(widen, (rebuilt.args, rebuilt.kwargs))
        with drawing_from(self._seed):
            masks = [noise.draw() for noise in self._noise]
        with Replayed(masks) if masks else contextlib.nullcontext():
            answer = outcome_of(module(*args, **kwargs), CallObjects(args, kwargs))
        gradients = self._gradients(
            answer,
            [tangent.double() for tangent in self._tangents],
            [copies[id(tensor)] for tensor in self._wanted],
            only,
        )
        buffers = [copies[id(tensor)] for tensor in self._written]
        return _Run(answer, gradients, buffers, [], [])

    def run(self, by_kernel: bool, calls: int) -> None:
        """Makes calls with their backward, whose results nobody waits for."""
        module, args, kwargs = self._rebuilt.module, self._rebuilt.args, self._rebuilt.kwargs
        self._core.set_modules_active(by_kernel)
        for _ in range(calls):
            self._gradients(module(*args, **kwargs), self._tangents, self._wanted, None)
        self._core.set_modules_active(True)


def _judge(
    rebuilt: Transferred,
    watched: _Watched,
    graphs: TrainingGraphs,
    paths: tuple[Path, Path],
    core: Any,
    seconds: dict[str, float],
    under: Mapping[str, str],
) -> ModuleResult:
    with autocast(under):
        native = outcome_of(rebuilt.module(*rebuilt.args, **rebuilt.kwargs), rebuilt.objects)
    strides = [list(t.stride()) for t in tensor_leaves(native)]
    answers = _TrainingAnswers(rebuilt, watched, graphs.noise or graphs.draws, core)
    with autocast(under, keeps_casts=False):
        answers.draw(SEEDS[0], SPREADS[0])
        plan = _plan(watched, graphs, answers)
    core.set_eager_gradients(eager_gradients)
    core.set_modules_training(True)
    try:
        with autocast(under, keeps_casts=False):
            kernel = core.load_module(
                [*map(str, paths)],
                str(graphs.device),
                graphs.inputs,
                graphs.ranges,
                strides,
                build_unflatten(graphs.outputs, len(strides)),
                plan,
                takes_objects=takes_objects(graphs.outputs),
            )
            answers.put(kernel)
            with _clocked(seconds, "prove"):
                numerics, error, native_error = _prove(answers, watched, rebuilt)
            with _clocked(seconds, "time"):
                answers.draw(SEEDS[0], SPREADS[0])
                measured = time_answers(answers, graphs)
    finally:
        answers.close()
        core.set_modules_training(False)
    errors = (error, native_error)
    facts = {
        **kernel_facts("module-training", graphs, strides, watched.functions, numerics, errors),
        "training": json.dumps(plan, separators=(",", ":")),
        "saved_bytes": str(saved_bytes(rebuilt, graphs)),
        "native_saved_bytes": str(watched.saved_bytes),
    }
    return ModuleResult(paths[0], facts, measured, seconds, more=(paths[1],))


def _plan(watched: _Watched, graphs: TrainingGraphs, answers: _TrainingAnswers) -> dict[str, Any]:
    """What `read_training_plan` of nn_modules/training.cc reads."""
    plan = graphs.plan()
    steps = watched.version_steps
    written = {graphs.inputs[index][1] for index in plan["buffers"]}
    if not set(steps) <= written:
        raise ProofFailed("a buffer is written that the traced graph does not write")
    strides = answers.gradient_strides()
    rows = []
    for index, tangents in zip(plan["gradients"], plan["reach"], strict=True):
        layout = strides.get(id(graphs.examples[index]))
        if layout is None:
            raise ProofFailed("the traced graph has a gradient that the forward has not")
        rows.append([index, tangents, layout])
    return {
        "identity": watched.identity.digest,
        "keeps_output": watched.keeps_output,
        "buffers": [[index, steps.get(graphs.inputs[index][1], 0)] for index in plan["buffers"]],
        "saved": plan["saved"],
        "tangents": plan["tangents"],
        "gradients": rows,
        "rebuilt": plan["rebuilt"],
        "noise": plan["noise"],
        "draws": plan["draws"],
    }


class _Errors:
    """The largest of what the kernels and autograd are off by, over all draws."""

    def __init__(self) -> None:
        self.worst = self.native_worst = 0.0

    def compare(
        self,
        mine: torch.Tensor,
        native: torch.Tensor,
        reference: torch.Tensor,
        length: int,
        where: str,
        moved: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """One tensor."""
        if same_bits(mine, native):
            return
        errors = compare(mine.detach(), native.detach(), reference.detach(), length, where, moved)
        self.worst = max(self.worst, errors[0])
        self.native_worst = max(self.native_worst, errors[1])


def _prove(
    answers: _TrainingAnswers, watched: _Watched, rebuilt: Transferred
) -> tuple[str, float, float]:
    """(numerics, kernels' error, autograd's error). Raises ProofFailed."""
    tensors = [slot.tensor for slot in watched.identity.slots]
    tensors += argument_tensors(rebuilt.args, rebuilt.kwargs)
    length = max((tensor.numel() for tensor in tensors), default=2)
    errors = _Errors()
    numerics = "bitwise"
    for seed, spread in zip(SEEDS, SPREADS, strict=True):
        draw = partial(answers.draw, seed, spread)
        draw()
        alone = answers.alone() if seed == 0 else ()
        for only in (None, *alone):
            where = f"draw {seed}" + ("" if only is None else f", gradient of output {only} alone")
            native, mine = answers.call(False, only), answers.call(True, only)
            _compare_forms(native, mine, where)
            if _same(native, mine):
                continue
            numerics = "accurate"
            moved = Moved(rebuilt, partial(_moved_tensors, answers, only), draw)
            _compare_values(native, mine, answers.reference(only), length, where, errors, moved)
    return numerics, errors.worst, errors.native_worst


def _compare_forms(native: _Run, mine: _Run, where: str) -> None:
    compare_structure(native.answer, mine.answer, where)
    if native.versions != mine.versions:
        raise ProofFailed(f"the versions of written buffers differ ({where})")
    if native.drawn != mine.drawn:
        raise ProofFailed(f"other random numbers are drawn ({where})")
    for index, (a, b) in enumerate(zip(mine.gradients, native.gradients, strict=True)):
        if (a is None) != (b is None):
            raise ProofFailed(f"gradient {index} is missing on one side ({where})")
        if a is None or b is None:
            continue
        if (a.dtype, a.size(), a.stride()) != (b.dtype, b.size(), b.stride()):
            raise ProofFailed(f"gradient {index} has other metadata ({where})")


def _same(native: _Run, mine: _Run) -> bool:
    return (
        equal_answers(_detached(native.answer), _detached(mine.answer))
        and all(
            a is None or b is None or same_bits(a, b)
            for a, b in zip(native.gradients, mine.gradients, strict=True)
        )
        and all(same_bits(a, b) for a, b in zip(native.buffers, mine.buffers, strict=True))
    )


def _moved_tensors(answers: _TrainingAnswers, only: int | None) -> list[torch.Tensor | None]:
    run = answers.call(False, only)
    return [tensor.detach() if tensor is not None else None for _, tensor in _rows(run)]


def _rows(run: _Run) -> list[tuple[str, torch.Tensor | None]]:
    """All tensors of a run, and what they are called."""
    return [
        (f"{name} {index}", tensor)
        for name, tensors in (
            ("output", tensor_leaves(run.answer)),
            ("gradient", run.gradients),
            ("buffer", run.buffers),
        )
        for index, tensor in enumerate(tensors)
    ]


def _compare_values(
    native: _Run,
    mine: _Run,
    reference: _Run,
    length: int,
    where: str,
    errors: _Errors,
    moved: Moved,
) -> None:
    for position, ((name, a), (_, b), (_, wider)) in enumerate(
        zip(_rows(mine), _rows(native), _rows(reference), strict=True)
    ):
        if a is None or b is None:
            continue
        if wider is None:
            raise ProofFailed(f"the reference has no {name} ({where})")
        errors.compare(a, b, wider, length, f"{name}, {where}", partial(moved.of, position))
