"""Calls of a module and of its gradients, through the kernels or through autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.answer_structure import (
    outcome_of,
    take,
)
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import identify
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.objects import map_tensors
from eagercache.callables.surroundings import (
    drawing_from,
    torch_states,
)
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.compat.checkpoints import replayed
from eagercache.worker.graphs.dropout_masks import Draw
from eagercache.worker.modules.answers import Answers
from eagercache.worker.modules.comparison import tensor_leaves
from eagercache.worker.modules.proof import in_float64, wide, wide_copy
from eagercache.worker.modules.training_watch import Watched


@dataclass(frozen=True)
class Run:
    """What one call and its backward gave."""

    answer: Any
    gradients: list[torch.Tensor | None]  # of the wanted tensors
    buffers: list[torch.Tensor]
    versions: list[int]
    drawn: list[Any]  # what torch's generators were at after the call


class TrainingAnswers(Answers):
    """Calls the module, and asks for its gradients, through the kernels or through autograd."""

    def __init__(
        self,
        rebuilt: Transferred,
        watched: Watched,
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

    @property
    def wanted(self) -> Sequence[torch.Tensor]:
        """The tensors whose gradients a `Run` has."""
        return self._wanted

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

    def input_id(self, source: tuple[bool, int]) -> int:
        """The identity of the tensor that an input of the forward's kernel comes from."""
        of_module, index = source
        if of_module:
            return id(self._watched.identity.slots[index].tensor)
        return id(argument_tensors(self._rebuilt.args, self._rebuilt.kwargs)[index])

    def gradient_strides(self) -> dict[int, list[int]]:
        """The strides of autograd's own gradients, by the identity of the tensor."""
        gradients = self.call(by_kernel=False).gradients
        return {
            id(tensor): list(gradient.stride())
            for tensor, gradient in zip(self._wanted, gradients, strict=True)
            if gradient is not None
        }

    def call(self, by_kernel: bool, only: int | None = None) -> Run:
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
        return Run(answer, gradients, after, moved, drawn)

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
        leaves += [change.value for change in self._rebuilt.objects.changes()]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def reference(self, only: int | None = None) -> Run:
        """What a float64 copy gives."""
        with (
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            self.forward_alone(),
        ):
            return in_float64(lambda: self._reference(only))

    def _reference(self, only: int | None) -> Run:
        rebuilt = self._rebuilt
        copies: dict[int, torch.Tensor] = {}

        def widen(value: torch.Tensor) -> torch.Tensor:
            if id(value) in copies:  # given twice, and one there, too
                return copies[id(value)]
            made = wide(value)
            if made is not value and value.requires_grad:
                made.requires_grad_()
            copies[id(value)] = made
            return made

        module = wide_copy(rebuilt.module)
        own = identify(module)
        for mine, slot in zip(self._identity.slots, own.slots, strict=True):
            copies[id(mine.tensor)] = slot.tensor
        args, kwargs = map_tensors((rebuilt.args, rebuilt.kwargs), widen)
        with drawing_from(self._seed):
            masks = [noise.draw() for noise in self._noise]
        with replayed(masks) as in_order:
            with in_order if masks else contextlib.nullcontext():
                objects = rebuilt.objects_of(module, args, kwargs)
                answer = outcome_of(module(*args, **kwargs), objects)
            gradients = self._gradients(
                answer,
                [tangent.double() for tangent in self._tangents],
                [copies[id(tensor)] for tensor in self._wanted],
                only,
            )
        buffers = [copies[id(tensor)] for tensor in self._written]
        return Run(answer, gradients, buffers, [], [])

    def run(self, by_kernel: bool, calls: int) -> None:
        """Makes calls with their backward, whose results nobody waits for."""
        module, args, kwargs = self._rebuilt.module, self._rebuilt.args, self._rebuilt.kwargs
        self._core.set_modules_active(by_kernel)
        objects = self._rebuilt.objects
        for _ in range(calls):
            self._gradients(module(*args, **kwargs), self._tangents, self._wanted, None)
            if objects.stores is not None:
                objects.restore()
        self._core.set_modules_active(True)
