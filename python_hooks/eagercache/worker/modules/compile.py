"""The worker's half of accelerating a module: run, trace, compile, prove, time.

The module that arrives is a copy with made-up values (`module_transfer`). Its forward runs first,
watched: what it prints, draws, writes or remembers makes it unfit. Then one call is traced into a
graph and compiled, and the container answers calls of the very module object through the same path
as in the user's process, beside its forward.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables import call_hooks
from eagercache.callables.answer_structure import refuse_lasting
from eagercache.callables.answers import views_among
from eagercache.callables.arguments import OPEN, argument_tensors, sized_values, sizes_of
from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.surroundings import (
    Listener,
    autocast,
    drawing_from,
    main_of,
    other_states,
    torch_states,
)
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.callables.written_tensors import marks_of
from eagercache.calls.contract import are_of, module_contracts
from eagercache.calls.numerics import same_bits
from eagercache.worker.compat import aot_inductor
from eagercache.worker.graphs.indices import indexes
from eagercache.worker.graphs.nodes import coarsest_cast
from eagercache.worker.graphs.tensor_names import tensor_names
from eagercache.worker.graphs.vector_products import use_vector_products
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.modules.answers import Answers, time_answers
from eagercache.worker.modules.class_rows import rows_of_class
from eagercache.worker.modules.comparison import equal_answers
from eagercache.worker.modules.facts import call_facts, kernel_facts, output_strides
from eagercache.worker.modules.proof import prove_calls
from eagercache.worker.modules.reads import Reads, check_names, refuse_array_memory
from eagercache.worker.modules.rebuilt_call import MAX_FUNCTIONS, rebuilt_call
from eagercache.worker.modules.trace import ModuleGraph, trace_module
from eagercache.worker.timing import timing
from eagercache.worker.timing.gpu_memory import with_room

if TYPE_CHECKING:
    from eagercache.worker.modules.training_graphs import TrainingGraphs


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
    made: Sequence[Path] = (),
) -> ModuleResult:
    """Makes and judges the kernel that a request describes; ``judge`` stands for `_judge`.

    A container that was ``made`` elsewhere is judged instead, where it is of what is traced here.

    Raises CompileRefused (the forward stays, for good), ProofFailed, or CompileFailed.
    """
    open_sizes = [
        (int(tensor), int(dimension)) for tensor, dimension in description.get("open", ())
    ]
    with rebuilt_call(description) as rebuilt:
        with autocast(description["autocast"]):
            identity, functions, operators = watched_operators(rebuilt, description["identity"])
        begin = time.process_time()
        with (
            autocast(description["autocast"]),
            main_of(rebuilt.module, rebuilt.objects.found),
            call_hooks.originals(),
        ):
            traced = trace_module(rebuilt, identity, open_sizes, operators)
        seconds = {"trace": round(time.process_time() - begin, 3)}
        rebuilt.rounded_to = coarsest_cast(traced.graph.graph)
        try:
            contract = _contract(description, rebuilt, traced, tools)
            # One that calls the program's operators is made here, with them.
            if traced.calls is None and are_of([contract], made):
                path = made[0]
            else:
                path = _compile(traced, directory, tools, contract)
        finally:
            if traced.calls is not None:
                traced.calls.close()
        seconds.update(tools.commands.seconds)
        with autocast(description["autocast"], keeps_casts=False):
            judge = judge or _judge
            return judge(rebuilt, identity, traced, path, functions, core, seconds)


# ---- the forward, watched ------------------------------------------------------------------------


def watch_forward(rebuilt: Transferred, expected: str) -> tuple[Identity, list[list[str]]]:
    """Runs the forward. Raises CompileRefused when it does more than compute its answer."""
    return watched_operators(rebuilt, expected)[:2]


def watched_operators(
    rebuilt: Transferred, expected: str
) -> tuple[Identity, list[list[str]], list[str]]:
    """As `watch_forward`, and the custom operators that it calls: none of what they do counts."""
    try:
        return _observe(rebuilt, expected)
    except Unfit as error:
        raise CompileRefused(str(error)) from error


def _observe(rebuilt: Transferred, expected: str) -> tuple[Identity, list[list[str]], list[str]]:
    module = rebuilt.module
    identity = identify(module, allow_opaque=True)
    if identity.digest != expected:
        raise Unfit("its attributes change, or cannot be rebuilt in another process")
    before = [slot.tensor.clone() for slot in identity.slots]
    arguments = argument_tensors(rebuilt.args, rebuilt.kwargs)
    given = [tensor.clone() for tensor in arguments]
    watched = [*_tensors_of(identity), *arguments]
    marks = marks_of(watched)
    states = other_states()
    with rebuilt.finds_writes(identity.slots), Reads(watched, gradients=False) as reads:
        rebuilt.run()  # what a first call sets up is not its effect
    refuse_array_memory(identity, rebuilt.run)
    reads.check()
    refuse_changes(identity, module)  # what it changes might be as before after two runs
    if marks_of([*_tensors_of(identity), *arguments]) != marks:
        raise Unfit("it changes more of a tensor than its values")
    output, errors = Listener(), Listener()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        drawing_from(0),  # not recorded: a first seed asks for the variables of GPUs
        FunctionRecorder(skips_operators=True) as recorder,
    ):
        before_it = torch_states()
        first = rebuilt.run()
        rebuilt.draws = torch_states() != before_it
    check_names(recorder, rebuilt.attributes)
    if output.wrote or errors.wrote:
        raise Unfit("it prints")
    recorder.check_effects()
    if other_states() != states:
        raise Unfit("it draws random numbers that are not torch's")
    refuse_changes(identity, module)
    if any(not same_bits(a, b) for a, b in zip(before, _tensors_of(identity), strict=True)):
        raise Unfit("it writes to its parameters or buffers")
    if any(not same_bits(a, b) for a, b in zip(given, arguments, strict=True)):
        raise Unfit("it writes to its arguments")
    with drawing_from(0):
        another = rebuilt.run()
    refuse_lasting(first, another, rebuilt.objects.found)
    if not equal_answers(first, another):
        raise Unfit("its answers differ from run to run")
    try:
        functions = read_beside(recorder, module, rebuilt.objects.found)
    except Unfit:
        with (  # what made that code may be a reason that says more
            main_of(module, rebuilt.objects.found),
            call_hooks.originals(),
        ):
            trace_module(rebuilt, identity, (), recorder.operators)
        raise
    if len(functions) > MAX_FUNCTIONS:
        raise Unfit("its forward runs too many different functions")
    refuse_shared(first, [*_tensors_of(identity), *arguments], views=True)
    return identity, functions, recorder.operators


def refuse_changes(identity: Identity, module: torch.nn.Module) -> None:
    """Raises Unfit where a run of its forward has made another module of the described one."""
    if not identity.holds(module):
        raise Unfit("it changes attributes of its own")


def read_beside(
    recorder: FunctionRecorder, module: torch.nn.Module, objects: Sequence[Any] = ()
) -> list[list[str]]:
    """What ran, and what it read that no trace says, as an entry keeps both. Raises Unfit."""
    return [
        *(function.to_row() for function in recorder.used(module, objects)),
        *(list(row.to_row()) for kind in recorder.named_tuples for row in rows_of_class(kind)),
        *recorder.environment(),
        *(guard.to_row() for guard in tensor_names(recorder.ran())),
    ]


def _tensors_of(identity: Identity) -> list[torch.Tensor]:
    return [slot.tensor for slot in identity.slots]


def refuse_shared(answer: Any, inputs: list[torch.Tensor], *, views: bool = False) -> None:
    """Raises Unfit where the answer has memory of an input; without ``views``, or an element twice.

    A view of another output may always be there (`views_among`). What outputs share is compared
    when a kernel is proved (`compare_structure`).
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    leaves = pytree.tree_leaves(answer)
    known = views_among(leaves)
    parts: dict[int, list[torch.Tensor]] = {}  # by their memory's address
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
            raise Unfit(f"it returns a {type(leaf).__name__}")
        pointer = leaf.untyped_storage().data_ptr()
        if pointer in memory:
            raise Unfit("what it returns shares memory with an input")
        if index not in known:
            parts.setdefault(pointer, []).append(leaf)
    if not views and any(_overlap(several) for several in parts.values()):
        raise Unfit("what it returns shares elements with another output")


def _overlap(parts: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of one memory share elements, or cannot be told apart."""
    if len(parts) == 1:
        return False
    size = parts[0].element_size()
    taken = torch.zeros(parts[0].untyped_storage().nbytes() // size, dtype=torch.bool)
    for part in parts:
        own = taken.as_strided(part.size(), part.stride(), part.storage_offset())
        # One that has an element of its own twice cannot be marked.
        twice = any(step == 0 and n > 1 for n, step in zip(part.size(), part.stride(), strict=True))
        if twice or part.element_size() != size or own.any():
            return True
        own.fill_(True)
    return False


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


def open_rows(rebuilt: Transferred, traced: ModuleGraph | TrainingGraphs) -> list[list[int]]:
    """The sizes of each tensor and the counts of a call, `OPEN` where any is taken.

    Those of a tensor that was given before are zeros (`SizedForm`).
    """
    rows, met = [], set[int]()
    for value in sized_values(rebuilt.args, rebuilt.kwargs):
        sizes = sizes_of(value)
        again = isinstance(value, torch.Tensor) and id(value) in met
        rows.append([0] * len(sizes) if again else sizes)
        met.add(id(value))
    for tensor, dimension in traced.symbolic.open_sizes if traced.symbolic is not None else ():
        rows[tensor][dimension] = OPEN
    return rows


def _compile(traced: ModuleGraph, directory: Path, tools: Tools, contract: str) -> Path:
    def check(text: GeneratedText) -> None:
        proxied = aot_inductor.proxied_operators()
        if text.uses_proxy_executor and traced.calls is None:
            raise CompileRefused(text.proxy_reason)
        if traced.calls is not None:
            traced.calls.check(proxied)
        if text.num_inputs != len(traced.examples):
            raise CompileRefused("the generated code takes another number of tensors")
        if text.checks_values and not traced.ranges and not indexes(traced.graph.graph):
            raise CompileRefused("the generated code checks values")
        if not text.kernels and len(text.extern_calls) <= 1:
            raise CompileRefused("it is one library call: nothing to gain")

    if use_vector_products(traced.graph.graph):
        traced.graph.recompile()
    beside = traced.symbolic.shape_function if traced.symbolic is not None else None
    if traced.calls is not None:
        beside = traced.calls.text
    return tools.container(
        traced.graph, traced.examples, directory, check, beside, contract=contract
    )


# ---- prove and time ------------------------------------------------------------------------------


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
        numerics, error, native_error = with_room(lambda: prove_calls(rebuilt, answers, identity))
        seconds["prove"] = round(time.process_time() - begin, 3)
        rebuilt.draw(seed=0)
        measured = time_answers(answers, traced)
    finally:
        answers.close()
    errors = (error, native_error)
    facts = kernel_facts("module", traced, strides, functions, numerics, errors)
    return ModuleResult(path, facts, measured, seconds)
