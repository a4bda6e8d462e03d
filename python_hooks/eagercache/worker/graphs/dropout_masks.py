"""Random masks and numbers of a module's call: dropout's, ``torch.randn`` and their like.

Native draws them with its own operators and from the program's own generator, in the order in which
the forward would have. So a call has the very masks that it would have had without a kernel, and
what is drawn after it is the same, too. (Inductor would draw them from a generator of its own.)

They are drawn right before the forward's kernel, which takes them as inputs. Attention on a GPU
draws within its own kernels, between the masks of what comes before and after it: a forward with
such attention calls all operators that draw itself, one after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from eagercache.calls.numerics import HALF
from eagercache.calls.replay import generator_of
from eagercache.worker.graphs.indices import Range
from eagercache.worker.graphs.nodes import (
    arguments_of,
    called,
    draws_numbers,
    drops_nothing,
    operator_name,
)
from eagercache.worker.inductor.commands import CompileRefused

_aten = torch.ops.aten

# Operators that draw numbers without a look at any: the kind, and the two numbers that it goes
# with, or the names of the operator's arguments that are these.
_NUMBERS: dict[str, tuple[str, Any, Any]] = {
    "aten::randn": ("normal", 0.0, 1.0),
    "aten::rand": ("uniform", 0.0, 1.0),
    "aten::normal_functional": ("normal", "mean", "std"),
    "aten::uniform": ("uniform", "from", "to"),
    "aten::exponential": ("exponential", "lambd", 0.0),
    "aten::randint": ("integers", "low", "high"),
    "aten::randperm": ("permutation", "n", 0.0),
}
_INTEGERS = frozenset(("integers", "permutation"))
# The same in programs that were not decomposed.
_DRAWN_IN_PROGRAMS = frozenset(
    (*_NUMBERS, "aten::randn_like", "aten::rand_like", "aten::randint_like", "aten::normal")
)
_DTYPES = (torch.bool, *HALF, torch.float32, torch.float64)


@dataclass(frozen=True)
class Noise:
    """A mask, or other numbers, that a call draws.

    ``kind`` is "bernoulli", of which an element is one with the probability ``first``
    (``bernoulli_``), "dropout", of which one is dropped with it (``native_dropout``), "normal",
    with the mean ``first`` and the deviation ``second``, "uniform" between them, "exponential" of
    the rate ``first``, "integers" from ``first`` to below ``second``, or "permutation" of
    ``first`` numbers. ``dtype``, ``sizes`` and ``strides`` are those of the tensor that is written
    over, or else dropped from: all that the place of a number among those drawn depends on.
    """

    kind: str
    first: float
    second: float
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    def draw(self) -> torch.Tensor:
        """As nn_modules/noise.cc draws it, which calls do."""
        given = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)
        if self.kind == "permutation":
            return torch.randperm(int(self.first), dtype=self.dtype, device=self.device)
        if self.kind == "dropout":
            return torch.native_dropout(given, self.first, True)[1]
        if self.kind in ("bernoulli", "exponential"):
            named = given.bernoulli_ if self.kind == "bernoulli" else given.exponential_
            return named(self.first)
        if self.kind == "integers":
            return given.random_(int(self.first), int(self.second))
        by_two = given.normal_ if self.kind == "normal" else given.uniform_
        return by_two(self.first, self.second)

    def resized(self, size: Callable[[Any], int]) -> Noise:
        """The same where ``size`` says what each size and stride is."""
        sizes, strides = tuple(map(size, self.sizes)), tuple(map(size, self.strides))
        return replace(self, sizes=sizes, strides=strides)

    def row(self) -> list[Any]:
        """What `read_noise` of nn_modules/noise.cc reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        numbers = [self.first, self.second]
        return [self.kind, *numbers, dtype, list(self.sizes), list(self.strides)]

    def within(self, low: int, high: int) -> bool:
        """Whether all of its numbers are integers from ``low`` to below ``high``."""
        if self.kind == "permutation":
            return low <= 0 and self.first <= high
        return self.kind == "integers" and low <= self.first and self.second <= high


# Attention that drops elements of its weights within its own kernels.
_ATTENTION = {
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
}


@dataclass(frozen=True)
class _Layout:
    """Of a tensor that an operator is given."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    def resized(self, size: Callable[[Any], int]) -> _Layout:
        """As that of `Noise`."""
        sizes, strides = tuple(map(size, self.sizes)), tuple(map(size, self.strides))
        return replace(self, sizes=sizes, strides=strides)

    def zeros(self) -> torch.Tensor:
        """A tensor of this layout; elements may share their memory."""
        steps = zip(self.sizes, self.strides, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        memory = torch.zeros(extent, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.sizes, self.strides)


@dataclass(frozen=True)
class Attention:
    """The mask by which attention drops elements of its weights (batch, heads, queries, keys).

    ``arguments`` are the operator's, by name, a `_Layout` in the place of each tensor.
    """

    target: Any
    arguments: tuple[tuple[str, Any], ...]
    device: torch.device

    def resized(self, size: Callable[[Any], int]) -> Attention:
        """As that of `Noise`."""
        arguments = tuple(
            (name, value.resized(size) if isinstance(value, _Layout) else value)
            for name, value in self.arguments
        )
        return replace(self, arguments=arguments)

    def draw(self) -> torch.Tensor:
        """The mask that the operator would draw now; the generator is then where it leaves it.

        No operator gives it, but attention to weights that are all the same, and to values that are
        one-hot, does: as many keys a call as a value has elements.
        """
        given = {
            name: value.zeros() if isinstance(value, _Layout) else value
            for name, value in self.arguments
        }
        value = given["value"]
        keys, width = value.size(2), value.size(3)
        generator = generator_of(self.device)
        before = generator.get_state()
        parts = []
        for first in range(0, keys, width):
            generator.set_state(before)
            places = torch.arange(min(width, keys - first), device=self.device)
            value.zero_()
            value[:, :, first + places, places] = 1
            kept = self.target(**given)[0] != 0
            parts.append(kept[..., : len(places)])
        return torch.cat(parts, -1)


Draw = Noise | Attention


def drawn_within(graph: torch.fx.Graph) -> list[Draw]:
    """All that a graph draws, in order, where attention does; nothing for another graph.

    Raises CompileRefused where that cannot be drawn once more.
    """
    drawing = [node for node in graph.nodes if draws_numbers(node)]
    if not any(operator_name(node) in _ATTENTION for node in drawing):
        return []
    found: list[Draw] = []
    for node in drawing:
        draw = _attention_of(node) or _noise_of(node)
        if draw is None:
            raise CompileRefused(f"the forward draws random numbers ({node.target})")
        found.append(draw)
    return found


def keep_draws(
    joint: torch.fx.GraphModule,
    split: Callable[[], tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """What ``split`` gives of ``joint``, with nothing drawn in the second part.

    Raises CompileRefused where it is all the same.
    """
    for node in joint.graph.nodes:
        if draws_numbers(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    forward, backward = split()
    if any(draws_numbers(node) for node in backward.graph.nodes):
        raise CompileRefused("the backward draws random numbers")
    return forward, backward


def _attention_of(node: torch.fx.Node) -> Attention | None:
    if operator_name(node) not in _ATTENTION:
        return None
    arguments = pytree.tree_map_only(torch.fx.Node, _layout_of, arguments_of(node))
    query, value = arguments["query"], arguments["value"]
    if len(query.sizes) != 4 or query.sizes[:2] != value.sizes[:2] or query.device.type != "cuda":
        return None
    return Attention(node.target, tuple(arguments.items()), query.device)


def _layout_of(node: torch.fx.Node) -> _Layout:
    value = node.meta["val"]
    return _Layout(value.dtype, tuple(value.size()), tuple(value.stride()), value.device)


def take_noise(joint: torch.fx.GraphModule) -> list[Noise]:
    """Makes every mask that a traced graph draws an input, after the others; other numbers, too.

    In the order in which they are drawn. The graph of a call and its gradients has inputs of its
    own for the gradients, "tangents", which stay the last.
    """
    graph = joint.graph
    inputs = graph.find_nodes(op="placeholder")
    tangents = [node for node in inputs if "tangents" in str(node.target)]
    last = tangents[0].prev if tangents else inputs[-1]
    found: list[Noise] = []
    for node in list(graph.nodes):
        noise = _noise_of(node) or _numbers_of(node)
        if noise is None:
            continue
        with graph.inserting_after(last):
            last = mask = graph.placeholder(f"primals_noise_{len(found)}")
        found.append(noise)
        if operator_name(node) != "aten::native_dropout":
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


def number_layouts(graph: torch.fx.Graph) -> list[tuple[int, ...]]:
    """The strides of the numbers that a graph draws which are no masks, in its order.

    Which number lies where depends on them, and what an operator is decomposed into may forget them
    (``randn_like`` of what is channels_last).
    """
    return [
        node.meta["val"].stride()
        for node in graph.nodes
        if operator_name(node).removesuffix("_") in _DRAWN_IN_PROGRAMS
    ]


def noise_as_drawn(
    made: torch.fx.GraphModule,
    program: Sequence[tuple[int, ...]],
    devices: Collection[str],
) -> list[Noise]:
    """`take_noise`. Raises CompileRefused for numbers that calls would draw otherwise.

    ``program``: `number_layouts` of what ``made`` was decomposed from. ``devices``: those of the
    call's tensors, by their types.
    """
    if number_layouts(made.graph) != program:
        raise CompileRefused("the forward draws random numbers in a layout of their own")
    noise = take_noise(made)
    if any({one.device.type} != set(devices) for one in noise):
        raise CompileRefused("the forward draws random numbers on another device")
    return noise


def is_index(noise: Noise) -> bool:
    """Whether it may be used as indices, which `ranges_of_given` has looked at."""
    return noise.kind in _INTEGERS


def ranges_of_given(
    ranges: Sequence[Range], given: int, noise: Sequence[Noise]
) -> tuple[Range, ...]:
    """Those of the first ``given`` inputs; what is drawn behind them is known.

    Raises CompileRefused where that may be outside of its range.
    """
    for place, low, high, _ in ranges:
        if place >= given and not noise[place - given].within(low, high):
            raise CompileRefused("the forward indexes with random numbers")
    return tuple(one for one in ranges if one[0] < given)


def _numbers_of(node: torch.fx.Node) -> Noise | None:
    kind, first, second = _NUMBERS.get(operator_name(node), ("", 0.0, 0.0))
    if not kind:
        return None
    schema: Any = getattr(node.target, "_schema", None)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    value, given = node.meta["val"], defaults | arguments_of(node)
    wanted = (torch.int64, torch.int32) if kind in _INTEGERS else _DTYPES[1:]
    numbers = [given[at] if isinstance(at, str) else at for at in (first, second)]
    known = all(type(number) in (int, float) for number in numbers)
    if value.dtype not in wanted or value.numel() == 0 or given.get("generator") or not known:
        return None
    # What a row of a plan, or the dtype, has exactly.
    largest = 1 << (53 if value.dtype == torch.int64 else 31)
    if kind in _INTEGERS and max(map(abs, numbers)) >= largest:
        return None
    layout = (tuple(value.size()), tuple(value.stride()), value.device)
    return Noise(kind, float(numbers[0]), float(numbers[1]), value.dtype, *layout)


def _noise_of(node: torch.fx.Node) -> Noise | None:
    name = operator_name(node)
    if name not in ("aten::bernoulli", "aten::native_dropout") or len(node.args) < 2:
        return None
    like, probability = node.args[0], node.args[1]
    assert isinstance(like, torch.fx.Node)
    value = like.meta["val"]
    if not isinstance(probability, float) or value.dtype not in _DTYPES or value.numel() == 0:
        return None
    # Of what has gaps, or elements that share their memory, the mask has neither.
    strides = torch.empty_like(value, device="meta").stride()
    layout = (tuple(value.size()), tuple(strides), value.device)
    if name == "aten::bernoulli":
        if node.kwargs or len(node.args) > 2:
            return None  # a generator of the module's own
        return Noise("bernoulli", probability, 0.0, value.dtype, *layout)
    if list(node.args[2:]) != [True] or node.kwargs or not 0 < probability < 1:
        return None
    if value.device.type == "cpu":  # where nothing is made of the mask in the same step
        return Noise("bernoulli", 1.0 - probability, 0.0, torch.bool, *layout)
    given = (tuple(value.size()), tuple(value.stride()), value.device)
    return Noise("dropout", probability, 0.0, value.dtype, *given)


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
