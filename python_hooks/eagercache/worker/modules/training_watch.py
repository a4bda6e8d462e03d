"""What the module's own forward and autograd do in a call that needs gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables import call_hooks
from eagercache.callables.answer_structure import (
    holds_objects,
    in_objects,
    outcome_of,
    refuse_lasting,
    structure_of,
    take,
)
from eagercache.callables.answers import views_among
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.objects import Change
from eagercache.callables.surroundings import (
    Listener,
    drawing_from,
    main_of,
    other_states,
    torch_states,
)
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.callables.written_tensors import marks_of
from eagercache.calls.numerics import ProofFailed, same_bits
from eagercache.worker.graphs.custom_calls import is_custom
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.answers import needed_gradients
from eagercache.worker.modules.comparison import equal_answers, tensor_leaves
from eagercache.worker.modules.compile import read_beside, refuse_changes, refuse_shared
from eagercache.worker.modules.exported import export_strictly
from eagercache.worker.modules.joint_graph import OpenedAnswer
from eagercache.worker.modules.reads import Reads, check_names, refuse_array_memory
from eagercache.worker.modules.rebuilt_call import MAX_FUNCTIONS


@dataclass(frozen=True)
class Watched:
    """What the module's own forward and autograd did."""

    identity: Identity
    functions: list[list[str]]
    differentiable: list[bool]  # by tensor of the answer
    saves: set[int]  # addresses of the memory that is kept for the backward
    saved_bytes: int  # of it, what is not the module's own
    keeps_output: list[bool]
    strides: list[list[int]]  # of the answer's tensors
    opened: OpenedAnswer | None  # where arguments or the answer are or hold objects
    version_steps: dict[int, int]  # by slot: how far a written buffer's version moved
    behind: tuple[tuple[int, ...], ...]  # as TrainingGraphs has it
    draws: bool  # random numbers, of torch's own generators
    views: tuple[tuple[int, int, int], ...]  # (tensor of the answer, of which one, from where on)

    @property
    def traced(self) -> list[bool]:
        """The tensors of the answer whose gradients the backward takes: autograd has the views'."""
        views = {index for index, _, _ in self.views}
        return [has and index not in views for index, has in enumerate(self.differentiable)]


def watch_training(rebuilt: Transferred, expected: str) -> Watched:
    """Runs the forward. Raises CompileRefused when it does more than compute and write buffers."""
    try:
        return _observe(rebuilt, expected)
    except Unfit as error:
        raise CompileRefused(str(error)) from error


def _observe(rebuilt: Transferred, expected: str) -> Watched:
    module = rebuilt.module
    identity = identify(module, allow_opaque=True)
    if identity.digest != expected:
        raise Unfit("its attributes change, or cannot be rebuilt in another process")
    own = [slot.tensor for slot in identity.slots]
    arguments = argument_tensors(rebuilt.args, rebuilt.kwargs)
    _as_at_the_call(rebuilt, [*own, *arguments])
    with rebuilt.finds_stores():
        _first_run(rebuilt, identity, arguments)
    refuse_changes(identity, module)  # what it changes might be as before after two runs
    rebuilt.draw(seed=0)
    before = [slot.tensor.detach().clone() for slot in identity.slots]
    versions = [slot.tensor._version for slot in identity.slots]
    given = [tensor.detach().clone() for tensor in arguments]
    recorder = FunctionRecorder()
    answer, saved, draws = _run(rebuilt, recorder)
    first, opened = _taken(answer, rebuilt)
    check_names(recorder, rebuilt.attributes)
    recorder.check_effects()
    refuse_changes(identity, module)
    if any(not same_bits(a, b.detach()) for a, b in zip(given, arguments, strict=True)):
        raise Unfit("it writes to its arguments")
    steps = _written(identity, before, versions)
    after = [slot.tensor.detach().clone() for slot in identity.slots]
    _restore(identity, before)
    with drawing_from(0):
        another = module(*rebuilt.args, **rebuilt.kwargs)
    second, _ = _taken(another, rebuilt)
    refuse_lasting(answer, another, rebuilt.objects.found)
    if not equal_answers(detached(first), detached(second)):
        raise Unfit("its answers differ from run to run")
    if any(not same_bits(a, s.tensor.detach()) for a, s in zip(after, identity.slots, strict=True)):
        raise Unfit("what it writes differs from run to run")
    _restore(identity, before)
    functions = _functions(rebuilt, recorder)
    refuse_shared(first, [*own, *arguments])
    memory = {tensor.untyped_storage().data_ptr() for tensor in own}
    leaves = tensor_leaves(first)
    views = views_among(leaves)
    differentiable = [leaf.requires_grad for leaf in leaves]
    held = [False] * len(leaves) if opened is None else opened.in_objects
    if not any(has and not inside for has, inside in zip(differentiable, held, strict=True)):
        raise Unfit("nothing that it returns has a gradient")
    return Watched(
        identity=identity,
        functions=functions,
        differentiable=differentiable,
        saves=set(saved),
        saved_bytes=sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in memory),
        keeps_output=[_is_kept(leaf, saved) for leaf in leaves],
        strides=[list(leaf.stride()) for leaf in leaves],
        opened=opened,
        version_steps=steps,
        behind=parts_behind(
            [leaf for i, leaf in enumerate(leaves) if leaf.requires_grad and i not in views]
        ),
        draws=draws,
        views=tuple((i, of, leaves[i].storage_offset()) for i, of in sorted(views.items())),
    )


def check_as_watched(member: Transferred, watched: Watched) -> int:
    """Bytes that autograd keeps of a call of another size for its backward.

    Raises ProofFailed where it keeps other parts of the answer, or computes them otherwise of each
    other: a kernel of all sizes does the same for each.
    """
    answer, saved, _ = _run(member, FunctionRecorder())
    leaves = tensor_leaves(outcome_of(answer, member.objects))
    member.objects.restore()
    parts = [leaf for leaf in leaves if leaf.requires_grad]
    same = (
        [leaf.requires_grad for leaf in leaves] == watched.differentiable
        and [_is_kept(leaf, saved) for leaf in leaves] == watched.keeps_output
        and parts_behind(parts) == watched.behind
        and not views_among(leaves)
    )
    if not same:
        raise ProofFailed("autograd has another graph for another size")
    own = {slot.tensor.untyped_storage().data_ptr() for slot in watched.identity.slots}
    return sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in own)


def _is_kept(leaf: torch.Tensor, saved: Mapping[int, torch.Tensor]) -> bool:
    """Whether autograd keeps a tensor of the answer, and a kernel's backward may read it there.

    Generated code for a GPU reads 16 bytes at once, where memory of its own would have them.
    """
    aligned = leaf.storage_offset() * leaf.element_size() % 16 == 0
    return leaf.untyped_storage().data_ptr() in saved and (aligned or not leaf.is_cuda)


def parts_behind(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Of each of these tensors which others autograd's graph has on its ways back."""
    positions: dict[tuple[Any, int], list[int]] = {}
    for position, part in enumerate(parts):
        positions.setdefault((part.grad_fn, part.output_nr), []).append(position)
    everything = []
    for part in parts:
        met: set[tuple[Any, int]] = set()
        waiting, seen = [part.grad_fn], {part.grad_fn}
        while waiting:
            following = waiting.pop().next_functions
            met.update(following)
            fresh = {node for node, _ in following if node is not None} - seen
            seen |= fresh
            waiting.extend(fresh)
        behind = (positions[edge] for edge in met if edge in positions)
        everything.append(tuple(sorted(position for found in behind for position in found)))
    return tuple(everything)


def _as_at_the_call(rebuilt: Transferred, tensors: Sequence[torch.Tensor]) -> None:
    """Has those need gradients that did before the call, which may have assigned others.

    What stands for them was described after it.
    """
    needed = needed_gradients(rebuilt.key, len(tensors)) or ()
    for tensor, needs in zip(tensors, needed, strict=False):
        if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_(needs)


def _first_run(rebuilt: Transferred, identity: Identity, arguments: Sequence[torch.Tensor]) -> None:
    """Runs the forward, since what a first call sets up is not its effect. Raises Unfit.

    What it does to tensors is seen here: what is turned around is as it was after two calls.
    """
    own = [slot.tensor for slot in identity.slots]
    marks, written = marks_of([*own, *arguments]), [tensor._version for tensor in arguments]
    with Reads([*own, *arguments], gradients=True) as reads:
        rebuilt.module(*rebuilt.args, **rebuilt.kwargs)
    reads.check()
    if marks_of([*own, *arguments]) != marks or [t._version for t in arguments] != written:
        raise Unfit("it writes to its arguments, or changes more of a tensor than its values")
    refuse_array_memory(identity, rebuilt.run)


def _run(
    rebuilt: Transferred, recorder: FunctionRecorder
) -> tuple[Any, dict[int, torch.Tensor], bool]:
    """The answer, what autograd keeps for the backward by its memory's address, whether it draws.

    The recorder sees the call.
    """
    output, errors = Listener(), Listener()
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with drawing_from(0):
        states = torch_states(), other_states()
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            recorder,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            answer = rebuilt.module(*rebuilt.args, **rebuilt.kwargs)
        draws = torch_states() != states[0]
        if other_states() != states[1]:
            raise Unfit("it draws random numbers that are not torch's")
    if output.wrote or errors.wrote:
        raise Unfit("it prints")
    return answer, saved, draws


def _functions(rebuilt: Transferred, recorder: FunctionRecorder) -> list[list[str]]:
    """The functions that the forward ran."""
    try:
        functions = read_beside(recorder, rebuilt.module)
    except Unfit:
        _refuse_custom_operators(rebuilt)  # whose code is such
        raise
    if len(functions) > MAX_FUNCTIONS:
        raise Unfit("its forward runs too many different functions")
    return functions


def _refuse_custom_operators(rebuilt: Transferred) -> None:
    """Raises CompileRefused, naming one, where the forward calls such operators."""
    program = None
    with (
        contextlib.suppress(CompileRefused),
        main_of(rebuilt.module, rebuilt.objects.found),
        call_hooks.originals(),
    ):
        program, _ = export_strictly(rebuilt.module, rebuilt.args, rebuilt.kwargs)
    for node in program.graph.nodes if program is not None else ():
        if is_custom(node):
            raise CompileRefused(f"the forward calls the custom operator {node.target}")


def _taken(answer: Any, rebuilt: Transferred) -> tuple[Any, OpenedAnswer | None]:
    """What a call did (`outcome_of`), and what `_opened` says. What it assigned is put back."""
    outcome, changes = outcome_of(answer, rebuilt.objects), rebuilt.objects.changes()
    opened = _opened(answer, rebuilt, changes)
    rebuilt.objects.restore()
    return outcome, opened


def _opened(answer: Any, rebuilt: Transferred, changes: list[Change]) -> OpenedAnswer | None:
    """What there is to know of a call with objects, or an answer with some, or with stores."""
    if not rebuilt.objects.may_change and not holds_objects(answer):
        return None
    if any(not change.of_module for change in changes):
        raise Unfit("it changes an object that it is called with")
    structure = structure_of(answer, rebuilt.objects, changes)
    leaves: list[Any] = []
    take(structure, answer, leaves)
    held = [
        inside
        for leaf, inside in zip(leaves, in_objects(structure), strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    held += [False for change in changes if isinstance(change.value, torch.Tensor)]
    return OpenedAnswer(answer, structure, held, tuple(changes), rebuilt.objects.stores)


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


def detached(answer: Any) -> Any:
    """The answer with its tensors detached."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), answer)
