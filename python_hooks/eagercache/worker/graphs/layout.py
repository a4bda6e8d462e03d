"""Convolutions of pictures in channels_last, in a call that is traced with its gradients.

oneDNN, which computes them on CPU, brings tensors of the contiguous layout into another one before
each convolution, forward and backward; so does cuDNN in half precision, for tensor cores. In a
graph whose convolutions take channels_last, what stands between them and what is saved for the
backward has that layout too, and stays where it is. The answer and the gradients get the layout
that the module's own have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from eagercache.calls.numerics import HALF
from eagercache.worker.graphs.nodes import operator_name

_aten = torch.ops.aten

_GROUPS_AT = {"aten::conv2d": 6, "aten::convolution": 8}
# What may show the memory of another tensor.
_VIEWS = {
    "aten::alias",
    "aten::chunk",
    "aten::detach",
    "aten::expand",
    "aten::flatten",
    "aten::permute",
    "aten::reshape",
    "aten::select",
    "aten::slice",
    "aten::split",
    "aten::squeeze",
    "aten::t",
    "aten::transpose",
    "aten::unflatten",
    "aten::unsqueeze",
    "aten::view",
}


def use_channels_last(graph: torch.fx.Graph) -> bool:
    """Rewrites an exported graph in place; False where nothing was to be done."""
    convolutions = [node for node in graph.nodes if _is_of_pictures(node)]
    if not convolutions or _writes_into_views(graph):
        return False
    if any(_has_bias_without_effect(node) or _is_slower(node) for node in convolutions):
        return False
    for node in convolutions:
        with graph.inserting_before(node):
            picture = graph.call_function(
                _aten.contiguous.default,
                (node.args[0],),
                {"memory_format": torch.channels_last},
            )
        node.update_arg(0, picture)
    for node in list(graph.nodes):
        # What has another layout than it had cannot always be shown in other sizes.
        if operator_name(node) == "aten::view" and len(node.args) == 2 and _is_sizes(node.args[1]):
            node.target = _aten.reshape.default
    return True


def _is_of_pictures(node: torch.fx.Node) -> bool:
    if operator_name(node) not in _GROUPS_AT:
        return False
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 4
        and _has_fast_pictures(value)
        and isinstance(node.args[0], torch.fx.Node)
    )


def _has_fast_pictures(value: torch.Tensor) -> bool:
    """Whether the library that computes such convolutions is faster with channels_last."""
    if value.device.type == "cpu":
        return torch.backends.mkldnn.is_available()
    return value.device.type == "cuda" and value.dtype in HALF and torch.backends.cudnn.enabled


def _is_slower(node: torch.fx.Node) -> bool:
    """Whether cuDNN was seen to be slower in channels_last, and by far: by Inductor's authors.

    That is with groups of several channels, and where the channels become half as many or fewer.
    """
    weight = node.args[1]
    value = weight.meta.get("val") if isinstance(weight, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return False
    position = _GROUPS_AT[operator_name(node)]
    groups = node.args[position] if len(node.args) > position else node.kwargs.get("groups", 1)
    outputs, inputs, height = value.size()[:3]
    return (groups != 1 and inputs > 1) or (2 * outputs <= inputs and height > 1)


def _has_bias_without_effect(node: torch.fx.Node) -> bool:
    """Whether a batch norm takes the bias away again.

    Its gradient is rounding alone then, and larger where sums run over the pictures' points first
    than where they run over channels: too large for the proof.
    """
    bias = node.args[2] if len(node.args) > 2 else None
    return bias is not None and any("batch_norm" in operator_name(user) for user in node.users)


def _is_sizes(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _writes_into_views(graph: torch.fx.Graph) -> bool:
    """Whether something is written that a view shows, or through a view."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for position, argument in enumerate(schema.arguments[: len(node.args)]):
            written = node.args[position]
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if not isinstance(written, torch.fx.Node) or operator_name(written) in _VIEWS:
                return True
            if any(operator_name(user) in _VIEWS for user in written.users):
                return True
    return False


def in_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor, copied where it has other strides than those of a layout that is wanted."""
    wanted = tuple(strides)
    if tuple(tensor.stride()) == wanted:
        return tensor
    for layout in (torch.contiguous_format, torch.channels_last):
        if layout == torch.channels_last and tensor.dim() != 4:
            continue
        if wanted == torch.empty(tensor.size(), device="meta", memory_format=layout).stride():
            return tensor.clone(memory_format=layout)
    return tensor


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a picture has that layout and not the contiguous one."""
    return (
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
    )
