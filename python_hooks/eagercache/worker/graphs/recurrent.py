"""Recurrent layers of traced graphs, which torch's decompositions unroll over their steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import arguments_of, operator_name
from eagercache.worker.inductor.commands import CompileRefused

# A compile of that many takes minutes.
MAX_STEPS = 512

_OF_ONEDNN = (torch.float32, torch.bfloat16)
_LAYERS = frozenset(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"))


def check_recurrent(graph: torch.fx.Graph) -> None:
    """Raises CompileRefused for layers whose decompositions are no kernels.

    They leave out what is dropped between the parts of one of several layers, and a compiler takes
    about a second for every two steps.
    """
    for node in graph.nodes:
        if operator_name(node) not in _LAYERS:
            continue
        given = arguments_of(node)
        if given["train"] and given["dropout"] > 0 and given["num_layers"] > 1:
            raise CompileRefused("a recurrent layer drops elements, which a trace leaves out")
        if operator_name(node) == "aten::lstm" and _is_of_onednn(given):
            continue
        steps = _steps(given) * given["num_layers"] * (2 if given["bidirectional"] else 1)
        if steps > MAX_STEPS:
            raise CompileRefused(f"a recurrent layer would be unrolled into {steps} steps")


def _is_of_onednn(given: dict[str, Any]) -> bool:
    """Whether an LSTM becomes calls of oneDNN's, one for each layer and direction."""
    if torch.is_grad_enabled() or not torch._C._get_mkldnn_enabled():
        return False
    h, c = (state.meta["val"] for state in given["hx"])
    return (
        all(part.meta["val"].dtype in _OF_ONEDNN for part in (*given["hx"], *given["params"]))
        and h.device.type == "cpu"
        and h.size(2) == c.size(2)
    )


def _steps(given: dict[str, Any]) -> int:
    if "batch_sizes" in given:  # of a packed sequence, one for each step
        return int(given["batch_sizes"].meta["val"].size(0))
    sizes = given["input"].meta["val"].shape
    size = sizes[1 if given["batch_first"] else 0]
    return size if isinstance(size, int) else 0  # a size that is open is known when it is unrolled
