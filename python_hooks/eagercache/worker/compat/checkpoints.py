"""Parts of a forward under `torch.utils.checkpoint`, which are computed again for the backward.

TorchDynamo has each as a graph of its own, which `torch.export` cannot take. Here they are parts of
the traced graph, whose nodes say so in their metadata, as those of `torch.compile` do: a partition
then computes them again, and keeps what such a part is given.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from eagercache.calls.replay import Replayed

# What a partition reads of a node: what is to be done with it, and of which part it is.
_TAGS = ("recompute", "ac_graph_id")
_numbers = itertools.count(1)
# Why the parts that were traced since `noted_checkpoints` have no gradients by a kernel.
_reasons: list[str] = []


@functools.cache
def inline_checkpoints() -> None:
    """Has traces of this process take such parts. Imports TorchDynamo's operators."""
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    TagActivationCheckpoint.__call__ = _inlined


def _inlined(_: Any, part: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
    from torch.fx.traceback import preserve_node_meta
    from torch.utils.checkpoint import CheckpointPolicy

    if "_checkpoint_context_fn" in part.meta:
        raise RuntimeError("it gives torch.utils.checkpoint a context_fn")
    if options.get("use_reentrant", True):
        # Whether anything has a gradient is then asked of the arguments alone.
        _reasons.append("it calls torch.utils.checkpoint with use_reentrant=True")
    if not options.get("preserve_rng_state", True):
        _reasons.append("it calls torch.utils.checkpoint with preserve_rng_state=False")
    number = next(_numbers)
    for node in part.graph.nodes:
        if node.op.startswith("call_"):
            node.meta.update(zip(_TAGS, (CheckpointPolicy.PREFER_RECOMPUTE, number), strict=True))
    with preserve_node_meta():
        return torch.fx.Interpreter(part).run(*args)


class _Given(Replayed):
    """Masks from one of all on, with the place of the next."""

    def __init__(self, masks: Sequence[torch.Tensor], begin: int) -> None:
        super().__init__(masks[begin:])
        self.next = begin

    def _next(self, sizes: torch.Size) -> torch.Tensor:
        mask = super()._next(sizes)
        self.next += 1
        return mask


@contextlib.contextmanager
def replayed(masks: Sequence[torch.Tensor]) -> Iterator[Replayed]:
    """A block for a forward and its backward; in what is given the forward has those ``masks``.

    What the backward computes again has the masks that it had in the forward.
    """
    from torch.utils import checkpoint

    now = [_Given(masks, 0)]
    original: Any = checkpoint._CheckpointFrame

    class Frame(original):
        def __init__(self, recompute_fn: Callable[..., None], *rest: Any) -> None:
            begin = now[-1].next

            def again(*inputs: Any) -> None:
                now.append(_Given(masks, begin))
                try:
                    with now[-1]:
                        recompute_fn(*inputs)
                finally:
                    now.pop()

            super().__init__(again, *rest)

    checkpoint._CheckpointFrame = Frame
    try:
        yield now[0]
    finally:
        checkpoint._CheckpointFrame = original


@contextlib.contextmanager
def noted_checkpoints() -> Iterator[list[str]]:
    """A block; the list has why parts that are traced in it cannot have gradients by a kernel."""
    _reasons.clear()
    yield _reasons


def has_checkpoints(graph: torch.fx.Graph) -> bool:
    """Whether parts of the graph are to be computed again for the backward."""
    return any(_TAGS[0] in node.meta for node in graph.nodes)


def read_again(graph: torch.fx.Graph) -> set[str]:
    """The names of the graph's inputs that such parts read: once more for the backward."""
    return {
        node.name
        for node in graph.find_nodes(op="placeholder")
        if any(_TAGS[0] in user.meta for user in node.users)
    }


def is_written_twice(graph: torch.fx.Graph, written: Collection[str]) -> bool:
    """Whether such parts have to do with inputs, by their names, that the forward writes.

    What is computed again writes them once more, and reads what they were then.
    """
    met = {node for node in graph.find_nodes(op="placeholder") if node.name in written}
    for node in graph.nodes:
        if not met.isdisjoint(node.all_input_nodes):
            if _TAGS[0] in node.meta:
                return True
            schema = getattr(node.target, "_schema", None)
            if schema is None or any(one.alias_info is not None for one in schema.returns):
                met.add(node)
    return False


def with_tags(called: torch.fx.GraphModule) -> torch.fx.Interpreter:
    """What runs the graph so that a trace's nodes have these words of its own, and no others."""
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(called.graph, copied))
    for node, copy in copied.items():
        copy.meta = {name: node.meta[name] for name in _TAGS if name in node.meta}
    return torch.fx.Interpreter(torch.fx.GraphModule(called, graph))
