"""The worker's half of accelerating a module: run, trace, compile, prove, time.

The module that arrives is a copy with made-up values (`module_transfer`). Its forward runs first,
watched: what it prints, draws, writes or remembers makes it unfit. Then one call is traced into a
graph and compiled, and the container answers calls of the very module object through the same path
as in the user's process, beside its forward.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables import call_hooks
from eagercache.callables.answer_structure import outcome_of
from eagercache.callables.answers import compare_structure
from eagercache.callables.arguments import OPEN, argument_tensors, sized_values, sizes_of, stand_in
from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.module_transfer import Transferred, unpacked
from eagercache.callables.objects import CallObjects, map_tensors
from eagercache.callables.outputs import build_unflatten, takes_objects
from eagercache.callables.surroundings import (
    Listener,
    attention_order,
    autocast,
    casts_kept,
    main_of,
    random_states,
)
from eagercache.callables.trace_rows import rows_text
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.callables.written_tensors import counters
from eagercache.calls.contract import module_contracts
from eagercache.calls.description import decode_state
from eagercache.calls.numerics import ProofFailed, same_bits
from eagercache.worker.graphs.indices import indexes
from eagercache.worker.graphs.vector_products import use_vector_products
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.modules.comparison import Moved, compare
from eagercache.worker.modules.reads import Reads, check_names
from eagercache.worker.modules.tensor_names import tensor_names
from eagercache.worker.modules.trace import ModuleGraph, trace_module
from eagercache.worker.modules.wide_reference import in_float64
from eagercache.worker.timing import cuda_timing, timing

if TYPE_CHECKING:
    from eagercache.worker.modules.training_graphs import TrainingGraphs

SEEDS = (0, 1, 2)
SPREADS = (1.0, 1.0, 2.0)

MAX_FUNCTIONS = 400


@dataclass
class ModuleResult:
    """What became of a module's call; ``chosen``: at which sizes, where those are open."""

    path: Path
    facts: dict[str, str]
    timing: timing.Timing
    seconds: dict[str, float] = field(default_factory=dict)
    chosen: list[tuple[int, bool]] | None = None
    more: tuple[Path, ...] = ()  # other containers, in the order in which they are loaded


def compile_module(
    description: Mapping[str, Any],
    directory: Path,
    tools: Tools,
    core: Any,
    judge: Callable[..., ModuleResult] | None = None,
) -> ModuleResult:
    """Makes and judges the kernel that a request describes; ``judge`` stands for `_judge`.

    Raises CompileRefused (the forward stays, for good), ProofFailed, or CompileFailed.
    """
    open_sizes = [
        (int(tensor), int(dimension)) for tensor, dimension in description.get("open", ())
    ]
    for path in description["python_path"]:
        if path not in sys.path:
            sys.path.append(path)
    with (
        decode_state(description).applied(),
        attention_order(description.get("attention")),
        torch.no_grad(),
        unpacked(description["payload"]) as rebuilt,
    ):
        with autocast(description["autocast"]):
            identity, functions = watch_forward(rebuilt, description["identity"])
        begin = time.process_time()
        with (
            autocast(description["autocast"]),
            main_of(rebuilt.module, rebuilt.objects.found),
            call_hooks.originals(),
        ):
            traced = trace_module(rebuilt, identity, open_sizes)
        seconds = {"trace": round(time.process_time() - begin, 3)}
        path = _compile(traced, directory, tools, _contract(description, rebuilt, traced, tools))
        seconds.update(tools.commands.seconds)
        with autocast(description["autocast"], keeps_casts=False):
            judge = judge or _judge
            return judge(rebuilt, identity, traced, path, functions, core, seconds)


# ---- the forward, watched ------------------------------------------------------------------------


def watch_forward(rebuilt: Transferred, expected: str) -> tuple[Identity, list[list[str]]]:
    """Runs the forward. Raises CompileRefused when it does more than compute its answer."""
    try:
        return _observe(rebuilt, expected)
    except Unfit as error:
        raise CompileRefused(str(error)) from error


def _observe(rebuilt: Transferred, expected: str) -> tuple[Identity, list[list[str]]]:
    module = rebuilt.module
    identity = identify(module)
    if identity.digest != expected:
        raise Unfit("its attributes change, or cannot be rebuilt in another process")
    before = [slot.tensor.clone() for slot in identity.slots]
    arguments = argument_tensors(rebuilt.args, rebuilt.kwargs)
    given = [tensor.clone() for tensor in arguments]
    states = random_states()
    with rebuilt.finds_writes(), Reads(gradients=False) as reads:
        rebuilt.run()  # what a first call sets up is not its effect
    reads.check()
    output, errors = Listener(), Listener()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        FunctionRecorder() as recorder,
    ):
        first = rebuilt.run()
    check_names(recorder, rebuilt.attributes)
    if output.wrote or errors.wrote:
        raise Unfit("it prints")
    recorder.check_effects()
    if random_states() != states:
        raise Unfit("it draws random numbers")
    if identify(module).digest != expected:
        raise Unfit("it changes attributes of its own")
    if any(not same_bits(a, b) for a, b in zip(before, _tensors_of(identity), strict=True)):
        raise Unfit("it writes to its parameters or buffers")
    if any(not same_bits(a, b) for a, b in zip(given, arguments, strict=True)):
        raise Unfit("it writes to its arguments")
    if not equal_answers(first, rebuilt.run()):
        raise Unfit("its answers differ from run to run")
    try:
        functions = read_beside(recorder, module, rebuilt.objects.found)
    except Unfit:
        with call_hooks.originals():  # what made that code may be a reason that says more
            trace_module(rebuilt, identity)
        raise
    if len(functions) > MAX_FUNCTIONS:
        raise Unfit("its forward runs too many different functions")
    refuse_shared(first, [*_tensors_of(identity), *arguments], views=True)
    return identity, functions


def read_beside(
    recorder: FunctionRecorder, module: torch.nn.Module, objects: Sequence[Any] = ()
) -> list[list[str]]:
    """What ran, and what it read that no trace says, as an entry keeps both. Raises Unfit."""
    return [
        *(function.to_row() for function in recorder.used(module, objects)),
        *recorder.environment(),
        *(guard.to_row() for guard in tensor_names(recorder.ran())),
    ]


def _tensors_of(identity: Identity) -> list[torch.Tensor]:
    return [slot.tensor for slot in identity.slots]


def equal_answers(a: Any, b: Any) -> bool:
    """Whether two answers have the same leaves, tensors bit for bit."""
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(left) == len(right) and all(
        same_bits(x, y) if isinstance(x, torch.Tensor) else type(x) is type(y) and x == y
        for x, y in zip(left, right, strict=True)
    )


def refuse_shared(answer: Any, inputs: list[torch.Tensor], *, views: bool = False) -> None:
    """Raises Unfit where the answer has memory of an input; without ``views``, or one memory twice.

    What outputs share is compared when a kernel is proved (`compare_structure`).
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for leaf in pytree.tree_leaves(answer):
        if not isinstance(leaf, torch.Tensor):
            continue
        if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
            raise Unfit(f"it returns a {type(leaf).__name__}")
        pointer = leaf.untyped_storage().data_ptr()
        if pointer in memory:
            raise Unfit("what it returns shares memory with an input or another output")
        if not views:
            memory.add(pointer)


# ---- compile -------------------------------------------------------------------------------------


def _contract(
    description: Mapping[str, Any], rebuilt: Transferred, traced: ModuleGraph, tools: Tools
) -> str:
    """What the container says of the request's entry (calls/contract.py)."""
    form = "module_sizes" if description.get("open") else "module"
    with autocast(description["autocast"], keeps_casts=False):
        strides = output_strides(rebuilt, traced.outputs)
    facts = {**call_facts(form, traced), "output_strides": json.dumps(strides)}
    if traced.symbolic is not None:
        facts["sizes"] = json.dumps(open_rows(rebuilt, traced))
    (found,) = module_contracts(description["digest"], facts, tools.cpu_features, None)
    return found


def open_rows(rebuilt: Transferred, traced: ModuleGraph) -> list[list[int]]:
    """The sizes of each tensor and the counts of a call, `OPEN` where any is taken."""
    rows = [sizes_of(value) for value in sized_values(rebuilt.args, rebuilt.kwargs)]
    for tensor, dimension in traced.symbolic.open_sizes if traced.symbolic is not None else ():
        rows[tensor][dimension] = OPEN
    return rows


def _compile(traced: ModuleGraph, directory: Path, tools: Tools, contract: str) -> Path:
    def check(text: GeneratedText) -> None:
        if text.uses_proxy_executor:
            raise CompileRefused("the generated code needs the proxy executor")
        if text.num_inputs != len(traced.inputs):
            raise CompileRefused("the generated code takes another number of tensors")
        if text.checks_values and not traced.ranges and not indexes(traced.graph.graph):
            raise CompileRefused("the generated code checks values")
        if not text.kernels and len(text.extern_calls) <= 1:
            raise CompileRefused("it is one library call: nothing to gain")

    if use_vector_products(traced.graph.graph):
        traced.graph.recompile()
    beside = traced.symbolic.shape_function if traced.symbolic is not None else None
    return tools.container(
        traced.graph, traced.examples, directory, check, beside, contract=contract
    )


# ---- prove and time ------------------------------------------------------------------------------


class Answers:
    """Calls the module through its kernel or through its forward."""

    def __init__(self, rebuilt: Transferred, identity: Identity, core: Any) -> None:
        self._rebuilt = rebuilt
        self._core = core
        self._identity = identity

    def install(self, path: Path, traced: ModuleGraph, strides: list[list[int]]) -> None:
        """Makes the kernel answer. Raises ProofFailed when it does not."""
        unflatten = build_unflatten(traced.outputs, len(strides))
        kernel = self._core.load_module(
            [str(path)],
            str(traced.device),
            traced.inputs,
            traced.ranges,
            strides,
            unflatten,
            takes_objects=takes_objects(traced.outputs),
            writes=traced.writes,
            checks=traced.checks,
        )
        self.put(kernel)

    def use(self, member: Transferred) -> None:
        """Calls the same module with other arguments from now on."""
        self._rebuilt = member

    def put(self, kernel: Any) -> None:
        """Makes a loaded kernel answer. Raises ProofFailed when it does not."""
        key = self.watch()
        self._core.module_install(self._rebuilt.module, self._identity.digest, key, kernel)

    def watch(self) -> bytes:
        """Has the core watch the module; the key of its call. Raises ProofFailed."""
        module = self._rebuilt.module
        keys: list[bytes] = []
        self._core.set_module_handlers(
            None, None, lambda _module, _args, _kwargs, key, *_: keys.append(key), None
        )
        call_hooks.install_hooks(self._core)
        self._core.set_answering(True)
        self._core.set_modules_active(True)
        self._core.module_adopt(module)
        if not self._core.module_set_guard(
            module,
            self._identity.guard_entries(),
            self._identity.digest,
            self._core.module_version(module),
        ):
            raise ProofFailed("the module changes while it is looked at")
        self._rebuilt.run()
        if not keys:
            raise ProofFailed(f"the call steps aside: {self._aside()}")
        return keys[0]

    def _aside(self) -> str:
        for row in self._core.module_stats():
            if row["module"] is self._rebuilt.module:
                return ", ".join(row["aside_reasons"]) or "no reason given"
        return "the module is not known"

    def _hits(self) -> int:
        return sum(
            row["hits"]
            for row in self._core.module_stats()
            if row["module"] is self._rebuilt.module
        )

    def by_kernel(self) -> Any:
        """The kernel's answer. Raises ProofFailed when the forward answered."""
        before = self._hits()
        answer = self._rebuilt.run()
        if self._hits() != before + 1:
            raise ProofFailed(f"the kernel did not answer: {self._aside()}")
        return answer

    def by_forward(self) -> Any:
        """The forward's answer."""
        with self.forward_alone():
            return self._rebuilt.run()

    @contextlib.contextmanager
    def forward_alone(self) -> Iterator[None]:
        """No kernel answers meanwhile."""
        self._core.set_modules_active(False)
        try:
            yield
        finally:
            self._core.set_modules_active(True)

    def run(self, by_kernel: bool, calls: int) -> None:
        """Makes calls whose answers nobody waits for."""
        module, args, kwargs = self._rebuilt.module, self._rebuilt.args, self._rebuilt.kwargs
        objects = self._rebuilt.objects
        self._core.set_modules_active(by_kernel)
        if objects.found:  # on both sides
            counted = counters(self._rebuilt.written)
            for _ in range(calls):
                module(*args, **kwargs)
                objects.restore()
                counted.restore()
        else:
            for _ in range(calls):
                module(*args, **kwargs)
        self._core.set_modules_active(True)

    def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
        """Nanoseconds a call (forward, kernel), in alternation; see `timing.time_call`."""
        results = []
        for _ in range(pairs):
            row = []
            for by_kernel in (False, True):
                begin = time.perf_counter_ns()
                self.run(by_kernel, calls)
                row.append((time.perf_counter_ns() - begin) / calls)
            results.append((row[0], row[1]))
        return results

    def close(self) -> None:
        """Leaves nothing of this module behind in the core."""
        self._core.set_modules_active(False)
        self._core.set_answering(False)
        self._core.module_forget(self._rebuilt.module)


def _judge(
    rebuilt: Transferred,
    identity: Identity,
    traced: ModuleGraph,
    path: Path,
    functions: list[list[str]],
    core: Any,
    seconds: dict[str, float],
) -> ModuleResult:
    strides = output_strides(rebuilt, traced.outputs)
    answers = Answers(rebuilt, identity, core)
    try:
        answers.install(path, traced, strides)
        begin = time.process_time()
        numerics, error, native_error = prove_calls(rebuilt, answers, identity)
        seconds["prove"] = round(time.process_time() - begin, 3)
        rebuilt.draw(seed=0)
        measured = time_answers(answers, traced)
    finally:
        answers.close()
    errors = (error, native_error)
    facts = kernel_facts("module", traced, strides, functions, numerics, errors)
    return ModuleResult(path, facts, measured, seconds)


def time_answers(answers: Answers, traced: ModuleGraph | TrainingGraphs) -> timing.Timing:
    """Times the forward and the kernel, alone among this user's workers."""
    with timing.machine_to_itself(), casts_kept():
        if traced.device.type == "cuda":
            return cuda_timing.time_sides(answers.run)
        return timing.time_call(answers)  # type: ignore[arg-type]


def decide(measured: timing.Timing, margin: float) -> tuple[bool, str]:
    """(whether the kernel is faster, why not), by the rule of the device that was timed."""
    if isinstance(measured, cuda_timing.CudaTiming):
        return cuda_timing.decide_cuda(measured, margin)
    return timing.decide(measured, margin)


def kernel_facts(
    form: str,
    traced: ModuleGraph | TrainingGraphs,
    strides: list[list[int]],
    functions: list[list[str]],
    numerics: str,
    errors: tuple[float, float],
) -> dict[str, str]:
    """What an entry says of its kernel. ``errors``: the kernel's and the forward's."""
    return {
        **call_facts(form, traced),
        "device": traced.device.type,
        "numerics": numerics,
        "output_strides": json.dumps(strides),
        "functions": rows_text([*functions, *map(list, traced.guards)]),
        "largest_error": f"{errors[0]:.4g}",
        "native_error": f"{errors[1]:.4g}",
    }


def call_facts(form: str, traced: ModuleGraph | TrainingGraphs) -> dict[str, str]:
    """Those of them that say how the kernel is called."""
    return {
        "form": form,
        "inputs": json.dumps([[int(kind), index] for kind, index in traced.inputs]),
        "ranges": json.dumps(traced.ranges),
        "outputs": traced.outputs,
        "writes": json.dumps(traced.writes),
        "checks": str(int(traced.checks)),
    }


def output_strides(rebuilt: Transferred, outputs: str) -> list[list[int]]:
    """Those of the tensors that a kernel makes for the call.

    ``outputs``: how the answer is built of them, which says where one stands for a count.
    """
    made = iter(tensor_leaves(rebuilt.run()))
    counted = list(stand_in(0).stride())
    return [
        counted if "count" in leaf else list(next(made).stride())
        for leaf in json.loads(outputs)["leaves"]
        if "count" in leaf or "tensor" in leaf
    ]


def tensor_leaves(answer: Any) -> list[torch.Tensor]:
    """The tensors of an answer, in order."""
    return [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]


def prove_calls(
    rebuilt: Transferred,
    answers: Answers,
    identity: Identity,
    draws: Sequence[tuple[int, float]] = tuple(zip(SEEDS, SPREADS, strict=True)),
) -> tuple[str, float, float]:
    """(numerics, kernel's error, forward's error). Raises ProofFailed."""
    numerics = "bitwise"
    worst = native_worst = 0.0
    for seed, spread in draws:
        draw = partial(rebuilt.draw, seed, spread)
        draw()
        native, answer = answers.by_forward(), answers.by_kernel()
        where = f"draw {seed}"
        compare_structure(native, answer, where)
        if equal_answers(native, answer):
            continue
        numerics = "accurate"
        reference = _reference(rebuilt)
        length = max((max(s.tensor.size(), default=1) for s in identity.slots), default=2)
        moved = Moved(rebuilt, lambda: tensor_leaves(answers.by_forward()), draw)
        for index, (mine, natives, wide) in enumerate(
            zip(tensor_leaves(answer), tensor_leaves(native), reference, strict=True)
        ):
            errors = compare(
                mine, natives, wide, length, f"output {index}, {where}", partial(moved.of, index)
            )
            worst, native_worst = max(worst, errors[0]), max(native_worst, errors[1])
    with torch.inference_mode():
        compare_structure(answers.by_forward(), answers.by_kernel(), "inference mode")
    return numerics, worst, native_worst


def wide(value: Any) -> Any:
    """A tensor of floating-point numbers in float64, detached; anything else itself."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().to(torch.float64)
    return value


def _reference(rebuilt: Transferred) -> list[torch.Tensor]:
    """The answer of a float64 copy of the module."""

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            module = copy.deepcopy(rebuilt.module).double()
            # Copies, as the forward may write.
            args, kwargs = map_tensors((rebuilt.args, rebuilt.kwargs), lambda t: wide(t).clone())
            objects = CallObjects(args, kwargs)
            outcome = outcome_of(module(*args, **kwargs), objects)
            tensors = argument_tensors(args, kwargs)
            return [*tensor_leaves(outcome), *(tensors[write.index] for write in rebuilt.writes)]

    return in_float64(run)
