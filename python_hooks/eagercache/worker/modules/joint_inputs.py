"""The tensors that a traced call with gradients takes: its own, its module's and drawn masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity
from eagercache.worker.graphs.dropout_masks import Noise
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.exported import source_of, state_value, user_leaves
from eagercache.worker.modules.trace import MAX_CONSTANT_BYTES


@dataclass(frozen=True)
class Inputs:
    """The placeholders of an exported program that a call gives tensors to."""

    sources: list[tuple[bool, int] | Noise | None]  # None: a constant of the code
    values: list[torch.Tensor]
    positions: list[int]  # among all placeholders
    fixed: list[Any]  # a value for every placeholder
    # What stands for the values while the graph is traced: where sizes are open, fake tensors.
    traced: list[torch.Tensor]
    # Those of the call's tensors, by their number.
    of_arguments: dict[int, torch.Tensor]

    def arguments(self) -> dict[int, torch.Tensor]:
        """Those of the call, without the module's own, by their place."""
        return {
            index: value
            for index, (source, value) in enumerate(zip(self.sources, self.values, strict=True))
            if isinstance(source, tuple) and not source[0]
        }

    def add_noise(self, noise: Sequence[Noise], made: Sequence[torch.Tensor]) -> None:
        """Inputs of a traced graph that are none of the program's, ``made`` for one call."""
        self.sources.extend(noise)
        self.values.extend(made)
        self.traced.extend(made)


def read_inputs(
    program: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    identity: Identity,
    *,
    sizes_open: bool = False,
) -> Inputs:
    """The inputs of an exported call. Raises CompileRefused for what no call can give.

    ``sizes_open``: the program was exported with open sizes, as ``traced`` has them.
    """
    found = Inputs([], [], [], [], [], {})
    leaves = iter(user_leaves(program, tuple(args), dict(kwargs)))
    arguments = argument_tensors(args, kwargs)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    constant_bytes = 0
    for position, (node, spec) in enumerate(
        zip(placeholders, program.graph_signature.input_specs, strict=True)
    ):
        kind = spec.kind.name
        value = next(leaves) if kind == "USER_INPUT" else state_value(program, spec.target)
        found.fixed.append(value)
        if not isinstance(value, torch.Tensor):
            if node.users:
                raise CompileRefused("an argument that is no tensor is an input of the graph")
            continue
        source = source_of(value, kind, identity, arguments)
        if source is None:
            constant_bytes += value.numel() * value.element_size()
        found.sources.append(source)
        found.values.append(value)
        found.traced.append(node.meta["val"] if sizes_open else value)
        if kind == "USER_INPUT":
            assert source is not None
            found.of_arguments[source[1]] = found.traced[-1]
        found.positions.append(position)
    if constant_bytes > MAX_CONSTANT_BYTES:
        raise CompileRefused("the forward holds large constants")
    return found
