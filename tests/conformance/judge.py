"""What a call did to memory and metadata, compared with what native's did.

`observe` makes a call on arguments of its own and keeps everything that a program could see of it;
`compare` says in which of that two observations differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from eagercache.calls.numerics import same_bits
from torch.utils._pytree import tree_flatten

from .reference import differences
from .wider import Wider


@dataclass
class Observation:
    """One call: its answer or error, and the state of all that it was given.

    Attributes:
        error: type and message of what was raised.
        structure: how the answer is nested, and what of it is no tensor.
        outputs: its tensors.
        inputs: the tensors among the arguments, after the call.
        sources: for each output the first input with its memory, and the input that it is.
        sharing: for each output the first output with its memory.
        written: inputs whose bytes changed.
        moved: inputs that lie or look otherwise than before.
        versions: of inputs, how far each counter moved; of outputs, the counters.
        gradients: of inputs that need them, where a backward pass was asked for.
    """

    error: tuple[str, str] | None = None
    structure: str = ""
    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    sources: list[tuple[int | None, int | None]] = field(default_factory=list)
    sharing: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    moved: list[Any] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def values(self) -> list[torch.Tensor]:
        """Outputs and gradients, as dense tensors of their own."""
        made = [*self.outputs, *(g for g in self.gradients if g is not None)]
        return [_dense(tensor) for tensor in made if not tensor.is_meta]

    def all_values(self) -> list[torch.Tensor]:
        """`values`, and the inputs after the call.

        All of them: which ones a call writes other numbers to depends on the numbers.
        """
        return self.values + [_dense(tensor) for tensor in self.inputs if not tensor.is_meta]


Call = Callable[[Any], Any]


def observe(
    call: Call,
    arguments: Any,
    *,
    backward: bool = False,
    around: AbstractContextManager[Any] | None = None,
) -> Observation:
    """Makes ``call(arguments)``, and a backward pass of its answer where that is asked for.

    What looks at memory is no part of that: only the calls themselves are made within ``around``.
    """
    within = around if around is not None else contextlib.nullcontext()
    made = Observation(inputs=_tensors(arguments))
    before = [(_bytes(t), _version(t), _place(t)) for t in made.inputs]
    try:
        with within:
            answer = call(arguments)
        _read_answer(made, answer)
        if backward:
            made.gradients = _gradients(made, within)
    except Exception as error:
        made.error = (type(error).__name__, str(error))
    for index, (tensor, (content, version, place)) in enumerate(
        zip(made.inputs, before, strict=True)
    ):
        if content is not None and not torch.equal(content, _bytes(tensor)):
            made.written.add(index)
        made.moved.append(_place(tensor) != place and _shape(tensor))
        now = _version(tensor)
        made.versions.append(None if now is None or version is None else now - version)
    made.versions += [_version(output) for output in made.outputs]
    return made


def _read_answer(made: Observation, answer: Any) -> None:
    leaves, spec = tree_flatten(answer)
    described = ["tensor" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    made.structure = f"{spec} {described}"
    made.outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for output in made.outputs:
        memory = [_memory(t) for t in made.inputs]
        mine = _memory(output)
        shared = memory.index(mine) if mine is not None and mine in memory else None
        same = next((i for i, t in enumerate(made.inputs) if t is output), None)
        made.sources.append((shared, same))
    memories = [_memory(t) for t in made.outputs]
    made.sharing = [
        index if memory is None else memories.index(memory) for index, memory in enumerate(memories)
    ]


def _gradients(made: Observation, within: AbstractContextManager[Any]) -> list[torch.Tensor | None]:
    needing = [t for t in made.inputs if t.requires_grad and t.is_leaf]
    roots = [t for t in made.outputs if t.requires_grad]
    if not needing or not roots:
        return []
    seeds = [_seed_of(root) for root in roots]
    with within:
        return list(torch.autograd.grad(roots, needing, seeds, allow_unused=True))


def _seed_of(root: torch.Tensor) -> torch.Tensor:
    """Numbers near one, not all the same."""
    steps = torch.arange(root.numel(), device=root.device).remainder(7).reshape(root.size())
    return (1 + steps.to(torch.float64) / 8).to(root.dtype)


def compare(
    expected: Observation,
    actual: Observation,
    wider: Wider | None,
    notes: list[str] | None = None,
    *,
    values: bool = True,
) -> list[str]:
    """Every difference, one clause each. ``wider`` None: values must be equal bit for bit.

    ``notes`` gets what of `reference.differences`. ``values`` False: those of the answer are
    nobody's.
    """
    if expected.error or actual.error:
        if expected.error == actual.error:
            return _left_behind(expected, actual)
        return [f"error: native {_said(expected)}, here {_said(actual)}"]
    if expected.structure != actual.structure:
        return [f"structure: native {expected.structure}, here {actual.structure}"]
    found = _metadata("output", expected.outputs, actual.outputs)
    found += _metadata("gradient", *_both_gradients(expected, actual, found))
    for name, one, other in (
        ("aliasing", expected.sources, actual.sources),
        ("outputs' memory", expected.sharing, actual.sharing),
        ("version counters", expected.versions, actual.versions),
    ):
        if one != other:
            found.append(f"{name}: native {one}, here {other}")
    everything = wider is not None and (wider.composed or wider.statistics)
    found += _left_behind(expected, actual, by_value=everything)
    if not values:
        return found
    if everything and not found:
        return differences(expected.all_values(), actual.all_values(), wider, notes)
    # What was written is among the inputs and was compared there, bit for bit.
    return found or differences(expected.values, actual.values, wider, notes)


def _said(made: Observation) -> str:
    return f"raises {made.error[0]}: {made.error[1][:300]}" if made.error else "answers"


def _left_behind(expected: Observation, actual: Observation, by_value: bool = False) -> list[str]:
    """Inputs: the bytes of all their memory, and where they lie.

    ``by_value``: of written floating-point inputs the values are compared by their error instead,
    also where one side writes the numbers that were there.
    """
    found = []
    if expected.moved != actual.moved:
        found.append(f"inputs' layout: native {expected.moved}, here {actual.moved}")
    for index, (one, other) in enumerate(zip(expected.inputs, actual.inputs, strict=True)):
        if by_value and index in expected.written | actual.written and one.is_floating_point():
            continue
        if expected.error and expected.moved[index]:
            continue  # resized, and not written before the error
        if not _same_memory(one, other):
            written = "is written" if index in actual.written else "is not written"
            found.append(f"input {index} {written} and ends otherwise than native leaves it")
    return found


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = _bytes(one), _bytes(other)
    if left is None or right is None or torch.equal(left, right):
        return True
    # Any NaN stands for any other.
    if left.numel() != right.numel() or left.numel() % one.element_size():
        return False
    return same_bits(left.view(one.dtype), right.view(other.dtype))


_PROPERTIES: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = (
    ("dtype", lambda t: t.dtype),
    ("device", lambda t: t.device),
    ("layout", lambda t: t.layout),
    ("sizes", lambda t: tuple(t.size())),
    ("strides", lambda t: tuple(t.stride()) if t.layout == torch.strided else None),
    ("offset", lambda t: t.storage_offset() if t.layout == torch.strided else None),
    ("requires_grad", lambda t: t.requires_grad),
    ("grad_fn", lambda t: type(t.grad_fn).__name__ if t.grad_fn is not None else None),
    ("is_leaf", lambda t: t.is_leaf),
    ("is_inference", lambda t: t.is_inference()),
    ("is_conj", lambda t: t.is_conj()),
    ("is_neg", lambda t: t.is_neg()),
)


def _metadata(
    what: str, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> list[str]:
    found = []
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        for name, read in _PROPERTIES:
            left, right = read(one), read(other)
            if left != right:
                found.append(f"{what} {index}: {name} native {left}, here {right}")
    return found


def _both_gradients(
    expected: Observation, actual: Observation, found: list[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    defined = [[g is not None for g in one.gradients] for one in (expected, actual)]
    if defined[0] != defined[1]:
        found.append(f"gradients: native has {defined[0]}, here {defined[1]}")
        return [], []
    return (
        [g for g in expected.gradients if g is not None],
        [g for g in actual.gradients if g is not None],
    )


def repeatable(one: Observation, other: Observation) -> bool:
    """Whether two observations of the same call on the same side are equal bit for bit."""
    return len(one.values) == len(other.values) and not compare(one, other, None)


def without_memory(
    expected: Observation, actual: Observation, again: Sequence[Observation], wider: Wider | None
) -> list[str]:
    """What is left of the differences where native's memory is another one in each run.

    Such as lies behind what a resized tensor reaches. Empty where its values are, too, since then
    there is nothing to compare with. ``again`` are further runs.
    """
    if expected.error or actual.error:
        return []
    for other in again:
        if len(other.values) != len(expected.values) or not all(
            map(same_bits, other.values, expected.values)
        ):
            return []
    found = _metadata("output", expected.outputs, actual.outputs)
    return found or differences(expected.values, actual.values, wider)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _is_strided(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not torch._is_zerotensor(tensor)
    )


def _memory(tensor: torch.Tensor) -> int | None:
    if not _is_strided(tensor) or tensor.untyped_storage().nbytes() == 0:
        return None
    return tensor.untyped_storage()._cdata


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of all of the tensor's memory."""
    if not _is_strided(tensor):
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.detach().untyped_storage()).clone()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _shape(tensor: torch.Tensor) -> Any:
    if not _is_strided(tensor):
        return None
    return (
        str(tensor.dtype),
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.storage_offset(),
    )


def _place(tensor: torch.Tensor) -> Any:
    if not _is_strided(tensor):
        return None
    return (*_shape(tensor), tensor.untyped_storage().data_ptr())
