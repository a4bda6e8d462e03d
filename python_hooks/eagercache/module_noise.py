"""Random masks of a module's call: dropout's and their like.

Native draws them with its own operators and from the program's own generator, in the order in which
the forward would have, right before the forward's kernel, which takes them as inputs. So a call has
the very masks that it would have had without a kernel, and what is drawn after it is the same, too.
(In a kernel Inductor would draw them from a generator of its own.)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils._python_dispatch import TorchDispatchMode

from .module_nodes import called, drops_nothing, operator_name
from .numerics import HALF

_aten = torch.ops.aten

_DTYPES = (torch.bool, *HALF, torch.float32, torch.float64)


@dataclass(frozen=True)
class Noise:
    """A mask that a call draws.

    ``kind`` is "bernoulli", of which an element is one with ``probability`` (``bernoulli_``), or
    "dropout", of which one is dropped with it (``native_dropout``). ``dtype``, ``sizes`` and
    ``strides`` are those of the tensor that is written over, or else dropped from: all that the
    place of a number among those drawn depends on.
    """

    kind: str
    probability: float
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    def draw(self) -> torch.Tensor:
        """As module_noise.cc draws it, which calls do."""
        given = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)
        if self.kind == "bernoulli":
            return given.bernoulli_(self.probability)
        return torch.native_dropout(given, self.probability, True)[1]

    def row(self) -> list[Any]:
        """What `read_noise` of module_noise.cc reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.kind, self.probability, dtype, list(self.sizes), list(self.strides)]


def take_noise(joint: torch.fx.GraphModule) -> list[Noise]:
    """Makes every mask that a traced graph draws an input, after the others.

    In the order in which they are drawn. The graph of a call and its gradients has inputs of its
    own for the gradients, "tangents", which stay the last.
    """
    graph = joint.graph
    inputs = graph.find_nodes(op="placeholder")
    tangents = [node for node in inputs if "tangents" in str(node.target)]
    before = tangents[0] if tangents else inputs[-1].next
    found: list[Noise] = []
    for node in list(graph.nodes):
        noise = _noise_of(node)
        if noise is None:
            continue
        with graph.inserting_before(before):
            mask = graph.placeholder(f"primals_noise_{len(found)}")
        found.append(noise)
        if operator_name(node) == "aten::bernoulli":
            mask.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(mask)
        else:
            mask.meta["val"] = node.meta["val"][1]
            _drop_by(graph, node, mask)
        graph.erase_node(node)
    if found:
        graph.lint()
        joint.recompile()
    return found


def drawn_layouts(graph: torch.fx.Graph) -> list[tuple[int, ...]]:
    """The strides of what dropout drops from, and of other masks, in the order of the graph."""
    layouts = []
    for node in graph.nodes:
        name = operator_name(node).removesuffix("_")
        if name in ("aten::bernoulli", "aten::dropout", "aten::native_dropout"):
            value = node.meta["val"]
            if not drops_nothing(node):
                layouts.append((value[0] if isinstance(value, tuple) else value).stride())
    return layouts


def _noise_of(node: torch.fx.Node) -> Noise | None:
    name = operator_name(node)
    if name not in ("aten::bernoulli", "aten::native_dropout") or len(node.args) < 2:
        return None
    like, probability = node.args[0], node.args[1]
    assert isinstance(like, torch.fx.Node)
    value = like.meta["val"]
    if not isinstance(probability, float) or value.dtype not in _DTYPES or value.numel() == 0:
        return None
    layout = (tuple(value.size()), tuple(value.stride()), value.device)
    if name == "aten::bernoulli":
        if node.kwargs or len(node.args) > 2:
            return None  # a generator of the module's own
        return Noise("bernoulli", probability, value.dtype, *layout)
    if list(node.args[2:]) != [True] or node.kwargs or not 0 < probability < 1:
        return None
    if value.device.type == "cpu":  # where nothing is made of the mask in the same step
        return Noise("bernoulli", 1.0 - probability, torch.bool, *layout)
    return Noise("dropout", probability, value.dtype, *layout)


def _drop_by(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node) -> None:
    """Puts what native computes of an input and its mask in the place of a dropout."""
    x, probability = node.args[0], node.args[1]
    assert isinstance(x, torch.fx.Node)
    assert isinstance(probability, float)
    dtype = x.meta["val"].dtype
    wide = torch.float32 if dtype in HALF else dtype
    with graph.inserting_before(node):
        kept = called(graph, _aten.mul.Tensor, _cast(graph, x, wide), _cast(graph, mask, wide))
        scaled = called(graph, _aten.mul.Tensor, kept, 1.0 / (1.0 - probability))
        dropped = _cast(graph, scaled, dtype)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((dropped, mask)[user.args[1]])
        graph.erase_node(user)


def _cast(graph: torch.fx.Graph, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return called(graph, torch.ops.prims.convert_element_type.default, node, dtype)


class Replayed(TorchDispatchMode):
    """Masks that were drawn before, instead of new ones, for what runs in the block.

    Raises RuntimeError where other ones are drawn than those were.
    """

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._masks = iter(masks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.bernoulli_.float:
            return args[0].copy_(self._next(args[0]))
        if func is _aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            mask = self._next(args[0])
            scaled = args[0] * mask.to(args[0].dtype) * (1.0 / (1.0 - args[1]))
            return scaled.to(args[0].dtype), mask.to(torch.bool)
        return func(*args, **(kwargs or {}))

    def _next(self, like: torch.Tensor) -> torch.Tensor:
        mask = next(self._masks, None)
        if mask is None or mask.size() != like.size():
            raise RuntimeError(
                "eagercache: a module draws other random masks than it did in its call"
            )
        return mask
