"""Gradients of pools of a traced graph, on CPU.

Of average pools whose windows move by one Inductor's gradient finds the windows that an element
lies in by computed indices: it reads element by element, and where a normalization is fused with it
a loop takes minutes to be written. Such windows are the same in both directions: the gradient is a
pool, too, of what each window gives to its elements.

Those of max pools are native's (`aot_inductor.max_pool_gradients_by_native`), which is given an
argument of which it reads the sizes alone: nothing is computed or kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import called, operator_name

_aten = torch.ops.aten


def use_pools_for_gradients(graph: torch.fx.Graph) -> bool:
    """Rewrites a traced graph in place; False where nothing was to be done."""
    changed = False
    for node in graph.nodes:
        if operator_name(node) == "aten::max_pool2d_with_indices_backward":
            changed |= _take_sizes_alone(graph, node)
    found = [node for node in graph.nodes if _is_of_this_kind(node)]
    for node in found:
        gradient, _, kernel, _, padding, _, counts_padding, divisor = node.args
        with graph.inserting_before(node):
            if divisor is not None or counts_padding:
                size = divisor or kernel[0] * kernel[1]
                shares = called(graph, _aten.div.Scalar, gradient, size)
            else:
                shares = gradient
                for dimension, (size, pad) in enumerate(zip(kernel, padding, strict=True), -2):
                    held = _held(graph, gradient, dimension, size, pad)
                    shares = called(graph, _aten.div.Tensor, shares, held)
            beyond = _beyond(kernel, padding)
            pool = called(
                graph, _aten.avg_pool2d.default, shares, kernel, [1, 1], beyond, False, True, 1
            )
        node.replace_all_uses_with(pool)
        graph.erase_node(node)
    return changed or bool(found)


def _take_sizes_alone(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """Gives the gradient of a max pool memory without values as the pool's input."""
    gradient, x, *others = node.args
    value = x.meta["val"]
    if value.device.type != "cpu" or operator_name(x) == "aten::empty_strided":
        return False
    layout = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(node), value.fake_mode:
        made = called(graph, _aten.empty_strided.default, value.size(), value.stride(), **layout)
    node.args = (gradient, made, *others)
    return True


def _is_of_this_kind(node: torch.fx.Node) -> bool:
    if operator_name(node) != "aten::avg_pool2d_backward" or len(node.args) != 8:
        return False
    _, x, kernel, stride, padding = node.args[:5]
    value = x.meta["val"] if isinstance(x, torch.fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        and all(isinstance(sizes, (list, tuple)) and len(sizes) == 2 for sizes in (kernel, padding))
        and list(stride or kernel) == [1, 1]
        # What a pool takes as padding.
        and all(
            0 <= 2 * pad <= size for size, pad in zip(kernel, _beyond(kernel, padding), strict=True)
        )
    )


def _beyond(kernel: Sequence[int], padding: Sequence[int]) -> list[int]:
    """The padding with which the pool of the gradient has the sizes of the pool's input."""
    return [size - 1 - pad for size, pad in zip(kernel, padding, strict=True)]


def _held(
    graph: torch.fx.Graph, gradient: torch.fx.Node, dimension: int, size: int, pad: int
) -> torch.fx.Node:
    """How many elements a window has along a dimension, without padding, for each window there.

    Windows of ``size`` elements of which the first begins ``pad`` before the input.
    """
    windows = gradient.meta["val"].size(dimension)
    length = windows - 1 + size - 2 * pad
    with gradient.meta["val"].fake_mode:
        made: Any = graph.call_function(
            _aten.arange.start_step,
            (-pad, windows - pad),
            {"dtype": torch.float32, "device": torch.device("cpu")},
        )
        made.meta["val"] = _aten.arange.start_step(*made.args, **made.kwargs)
        ends = called(
            graph, _aten.clamp_max.default, called(graph, _aten.add.Scalar, made, size), length
        )
        held = called(
            graph, _aten.sub.Tensor, ends, called(graph, _aten.clamp_min.default, made, 0)
        )
        return held if dimension == -1 else called(graph, _aten.unsqueeze.default, held, -1)
