"""What a traced call that needs gradients is: its two graphs, and what passes between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from eagercache.worker.compat.symbolic_shapes import hints, size_at, size_text
from eagercache.worker.graphs.dropout_masks import Draw, Noise
from eagercache.worker.graphs.indices import Range
from eagercache.worker.graphs.rebuilt import Rebuilt
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.symbolic import SymbolicSizes


@dataclass(frozen=True)
class Saved:
    """Where one tensor comes from that the backward reads.

    ``kind``: "input" or "output" of the forward (the answer's tensors), or "made" for it alone.
    ``index`` counts within the kind.
    """

    kind: str
    index: int


@dataclass(frozen=True)
class TrainingGraphs:
    """A traced call.

    The forward's outputs are the tensors of the answer, the written buffers' new values and what is
    made for the backward, in this order; the backward's inputs are ``saved`` and the gradients of
    the outputs ``tangents``.

    Attributes:
        inputs: for each input of the forward (True, slot of the identity) or (False, argument).
        noise: the forward's further inputs: masks that a call draws before it, in this order.
        draws: or else what the forward itself draws, by native's operators and in this order.
        ranges: as those of `module_trace.ModuleGraph`.
        outputs: what `build_unflatten` makes the answer of, as JSON.
        differentiable: whether each tensor of the answer has a gradient.
        in_objects: whether an object in the answer holds it: none of ``tangents`` is its gradient.
        buffers: the inputs that the forward writes, all of them buffers.
        buffers_read: of each, whether anything but its own new value comes of what it held.
        gradients: the input that each output of the backward is the gradient of.
        reach: the positions in ``tangents`` on which each gradient depends.
        made_bytes: memory of what is made for the backward alone.
        rebuilt: those arguments of which something that is made has all that the graphs read, in a
            dtype to which all of the graph casts it at first. In the order of the arguments.
        behind: of each tensor of the answer that has a gradient, in order, which of these autograd
            computes it from in the module's own forward.
        symbolic: what is not known of the sizes; None where all are. Examples are fake then.
        redraws: whether masks are not kept, and the backward draws them once more.
        guards, writes, checks: as those of `trace.ModuleGraph`; nothing but buffers is written.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    inputs: tuple[tuple[bool, int], ...]
    noise: tuple[Noise, ...]
    draws: tuple[Draw, ...]
    examples: tuple[torch.Tensor, ...]
    backward_examples: tuple[torch.Tensor, ...]
    ranges: tuple[Range, ...]
    outputs: str
    differentiable: tuple[bool, ...]
    in_objects: tuple[bool, ...]
    buffers: tuple[int, ...]
    buffers_read: tuple[bool, ...]
    saved: tuple[Saved, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    reach: tuple[tuple[int, ...], ...]
    made_bytes: int
    rebuilt: tuple[Rebuilt, ...]
    guards: tuple[tuple[str, ...], ...] = ()
    writes: tuple[tuple[bool, int, int], ...] = ()
    checks: bool = False
    behind: tuple[tuple[int, ...], ...] = ()
    symbolic: SymbolicSizes | None = None
    redraws: bool = False

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.examples[0].device

    def largest_saved(self) -> str:
        """The three largest tensors that the forward makes for the backward, as text."""
        made = [
            example
            for saved, example in zip(self.saved, self.backward_examples, strict=False)
            if saved.kind == "made"
        ]
        made.sort(key=nbytes, reverse=True)
        texts = [f"{str(t.dtype).removeprefix('torch.')} {hints(t.size())}" for t in made[:3]]
        return f"; the largest of them are {', '.join(texts)}" if texts else ""

    def plan(self) -> dict[str, Any]:
        """What the core is told beside the forward's inputs and outputs."""
        made = self.backward_examples[: len(self.saved)]
        tangents = self.backward_examples[len(self.saved) :]
        rows = {
            output: [output, hints(t.size()), hints(t.stride()), False]
            for output, t in zip(self.tangents, tangents, strict=True)
        }
        have = [output for output, needed in enumerate(self.differentiable) if needed]
        place = {output: position for position, output in enumerate(have)}
        return {
            "buffers": list(self.buffers),
            "differentiable": list(self.differentiable),
            "saved": [
                [saved.kind, saved.index, hints(t.size()), hints(t.stride())]
                for saved, t in zip(self.saved, made, strict=True)
            ],
            "tangents": [
                [*rows.get(output, [output, [], [], True]), list(behind)]
                for output, behind in zip(have, self.behind, strict=True)
            ],
            "gradients": list(self.gradients),
            "reach": [[place[self.tangents[number]] for number in row] for row in self.reach],
            "rebuilt": [one.row() for one in self.rebuilt],
            "noise": [
                replace(one, sizes=tuple(hints(one.sizes)), strides=tuple(hints(one.strides))).row()
                for one in self.noise
            ],
            "draws": bool(self.draws),
            **({"redraws": True} if self.redraws else {}),
            **({"open": self._open_gradients()} if self.symbolic is not None else {}),
        }

    def _open_gradients(self) -> list[int]:
        """The positions in ``gradients`` of the call's own tensors, whose layouts are theirs."""
        return [place for place, index in enumerate(self.gradients) if not self.inputs[index][0]]

    def see_sizes(self, symbolic: SymbolicSizes, strides: Sequence[Sequence[int]]) -> None:
        """Has ``symbolic`` say how tensors are laid out: `with_sizes` of training_plan.h reads it.

        ``strides``: those of the answer's tensors in the traced call. Raises CompileRefused where
        the graph has others.
        """
        (output,) = self.forward.graph.find_nodes(op="output")
        answers = [node.meta["val"].stride() for node in output.args[0][: len(strides)]]
        if [hints(stride) for stride in answers] != [list(stride) for stride in strides]:
            raise CompileRefused("no kernel for several sizes: its answers are laid out otherwise")
        symbolic.strides = tuple(tuple(map(size_text, stride)) for stride in answers)
        given = [self.examples[self.gradients[place]] for place in self._open_gradients()]
        symbolic.numbers = tuple(
            size_text(number)
            for row in (
                *(row for t in self.backward_examples for row in (t.size(), t.stride())),
                *(t.stride() for t in given),
                *(row for one in self.noise for row in (one.sizes, one.strides)),
            )
            for number in row
        )

    def noise_of(self, numbers: Sequence[int]) -> tuple[Noise, ...]:
        """What a call draws for which the shape function gave those ``numbers``."""
        rest = list(numbers)[len(numbers) - sum(2 * len(one.sizes) for one in self.noise) :]
        found = []
        for one in self.noise:
            rank = len(one.sizes)
            sizes, strides, rest = rest[:rank], rest[rank : 2 * rank], rest[2 * rank :]
            found.append(replace(one, sizes=tuple(sizes), strides=tuple(strides)))
        return tuple(found)

    def draws_at(self, values: Sequence[int]) -> tuple[Draw, ...]:
        """What the forward itself draws in a call with these open sizes."""
        assert self.symbolic is not None
        named = self.symbolic.named(values)
        return tuple(one.resized(lambda size: size_at(size, named)) for one in self.draws)

    def saved_bytes(self) -> int:
        """Memory of what the forward makes for the backward, its answers and masks counted.

        Of the traced call.
        """
        masks = () if self.redraws else self.examples[len(self.inputs) :]
        read = zip(self.saved, self.backward_examples, strict=False)
        outputs = sum(nbytes(example) for source, example in read if source.kind == "output")
        return self.made_bytes + outputs + sum(map(nbytes, masks))


def nbytes(tensor: torch.Tensor) -> int:
    """Memory of a tensor's elements, in the traced call where sizes are open."""
    return math.prod(hints(tensor.size())) * tensor.element_size()
