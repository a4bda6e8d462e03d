"""Graphs of calls with their gradients, traced and split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch


def export_constants_of_objects() -> None:
    """Lets `torch.export` return a number that is read from an object, as it returns others.

    It asks for `is_input` of where such a number comes from, which only sources of arguments have.
    Newer torch asks with a default.
    """
    from torch._guards import Source

    if not hasattr(Source, "is_input"):
        Source.is_input = False


def joint_graph(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    *,
    gradients: bool = True,
) -> torch.fx.GraphModule:
    """The graph of ``function`` and of its gradients, without anything that writes.

    Its inputs are those of ``function`` ("primals") and the gradients of the outputs that need one
    ("tangents"); its outputs those of ``function``, then a gradient or None for each input. Inputs
    may not be written or handed back. The operators are those that Inductor decomposes into, with
    the casts of the autocast that is on; what draws dropout's masks stays native's. Without
    ``gradients`` the outputs are those of ``function`` alone.
    """
    import torch
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    drawn = {aten.bernoulli.p, aten.bernoulli_.float, aten.native_dropout.default}
    table = {op: rule for op, rule in select_decomp_table().items() if op not in drawn}
    # A program leaves the block of autocast before it calls backward.
    with torch.set_grad_enabled(gradients), config.patch(backward_pass_autocast="off"):
        made: Any = aot_export_joint_simple(
            function, inputs, trace_joint=gradients, decompositions=table
        )
    return cast("torch.fx.GraphModule", made)


def split_joint_graph(
    joint: torch.fx.GraphModule, outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward, backward) of a `joint_graph` whose function has that many outputs.

    The forward returns more at its end: what the backward takes before the tangents. What is cheap
    is computed again instead.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=outputs)
    return forward, backward
