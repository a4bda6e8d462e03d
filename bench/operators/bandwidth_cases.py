"""The bandwidth-bound calls that `bandwidth.py` times: functions of tensors, and their data.

Each has at least 64 MiB of inputs, more than a GPU's cache. A call's bytes are those of its inputs
and outputs, each once: what no kernel can do without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One call: ``function(*inputs(dtype, device))``.

    ``operator`` is the one that is hooked for it; a function of several operators has its schema
    in that place, and becomes an operator with `eagercache.op`.
    """

    operator: str
    function: Callable[..., Any]
    inputs: Callable[[torch.dtype, str], Tensors]


def moved(inputs: Tensors, outputs: Any) -> int:
    """Bytes of the tensors, each once."""
    made = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    tensors = [*inputs, *(tensor for tensor in made if isinstance(tensor, torch.Tensor))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rows(rows: int, columns: int, count: int = 1) -> Callable[[torch.dtype, str], Tensors]:
    return lambda dtype, device: tuple(
        torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(count)
    )


def _normed(rows: int, columns: int, statistics: int) -> Callable[[torch.dtype, str], Tensors]:
    """The gradient, the input, the row ``statistics`` in float32, the weight."""

    def make(dtype: torch.dtype, device: str) -> Tensors:
        grad, data = _rows(rows, columns, 2)(dtype, device)
        weight = torch.rand(columns, dtype=dtype, device=device)
        rowwise = tuple(torch.rand(rows, 1, device=device) + 0.5 for _ in range(statistics))
        return (grad, data, *rowwise, weight)

    return make


def _with_weights(rows: int, columns: int, weights: int) -> Callable[[torch.dtype, str], Tensors]:
    def make(dtype: torch.dtype, device: str) -> Tensors:
        return (
            *_rows(rows, columns)(dtype, device),
            *(torch.rand(columns, dtype=dtype, device=device) for _ in range(weights)),
        )

    return make


def _images(
    channels_last: bool, weights: int, gradient: bool, wide: bool = True
) -> Callable[[torch.dtype, str], Tensors]:
    """Images of 128 x 256 x 56 x 56; the channels' weights and statistics, float32 if ``wide``."""

    def make(dtype: torch.dtype, device: str) -> Tensors:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = tuple(
            torch.randn(128, 256, 56, 56, dtype=dtype, device=device).to(memory_format=layout)
            for _ in range(2 if gradient else 1)
        )
        of = torch.float32 if wide else dtype
        return (*images, *(torch.rand(256, device=device, dtype=of) + 0.5 for _ in range(weights)))

    return make


def _classes(rows: int, classes: int) -> Callable[[torch.dtype, str], Tensors]:
    def make(dtype: torch.dtype, device: str) -> Tensors:
        logits = torch.randn(rows, classes, dtype=dtype, device=device)
        return logits, torch.randint(classes, (rows,), device=device)

    return make


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss, of integer targets."""
    return functional.cross_entropy(logits, target)


def cross_entropy_backward(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The gradient by the logits, of which the forward's results are made again."""
    logs = torch.log_softmax(logits, 1)
    chosen = torch.arange(logits.shape[1], device=logits.device) == target.unsqueeze(1)
    return (logs.exp() - chosen.to(logs.dtype)) / logits.shape[0]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated unit of Llama's MLP, without its products."""
    return functional.silu(gate) * up


def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its gradients."""
    return aten.silu_backward(grad * up, gate), grad * functional.silu(gate)


def dropout_add(data: torch.Tensor, other: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """With the mask's draws as an input: the sides would draw different ones."""
    return torch.where(draws > 0, data * 1.25, 0) + other


def _rms_backward(
    grad: torch.Tensor, data: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> Any:
    return aten._fused_rms_norm_backward(grad, data, [data.shape[-1]], rstd, weight, [True, True])


def _layer_backward(
    grad: torch.Tensor,
    data: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
) -> Any:
    size = [data.shape[-1]]
    return aten.native_layer_norm_backward(grad, data, size, mean, rstd, weight, weight, [True] * 3)


def _batch_forward(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.native_batch_norm(data, weight, bias, None, None, True, 0.1, 1e-5)


def _batch_backward(
    grad: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> Any:
    return aten.native_batch_norm_backward(
        grad, data, weight, None, None, mean, rstd, True, 1e-5, [True] * 3
    )


def _group_forward(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.native_group_norm(data, weight, bias, 128, 256, 56 * 56, 32, 1e-5)


CASES: dict[str, Case] = {
    "layer_norm": Case(
        "aten::native_layer_norm",
        lambda x, w, b: aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5),
        _with_weights(16384, 4096, 2),
    ),
    "layer_norm backward": Case(
        "aten::native_layer_norm_backward", _layer_backward, _normed(16384, 4096, 2)
    ),
    "rms_norm": Case(
        "aten::_fused_rms_norm",
        lambda x, w: aten._fused_rms_norm(x, [x.shape[-1]], w, 1e-5),
        _with_weights(16384, 4096, 1),
    ),
    "rms_norm backward": Case(
        "aten::_fused_rms_norm_backward", _rms_backward, _normed(16384, 4096, 1)
    ),
    "softmax": Case("aten::_softmax", lambda x: aten._softmax(x, 1, False), _rows(16384, 8192)),
    "softmax backward": Case(
        "aten::_softmax_backward_data",
        lambda grad, out: aten._softmax_backward_data(grad, out, 1, out.dtype),
        _rows(16384, 8192, 2),
    ),
    "softmax of 128k": Case(
        "aten::_softmax", lambda x: aten._softmax(x, 1, False), _rows(1024, 131072)
    ),
    "log_softmax": Case(
        "aten::_log_softmax", lambda x: aten._log_softmax(x, 1, False), _rows(8192, 32000)
    ),
    "cross_entropy": Case("(Tensor x, Tensor t) -> Tensor", cross_entropy, _classes(8192, 50257)),
    "cross_entropy backward": Case(
        "(Tensor x, Tensor t) -> Tensor", cross_entropy_backward, _classes(8192, 50257)
    ),
    "batch_norm": Case("aten::native_batch_norm", _batch_forward, _images(False, 2, False)),
    "batch_norm backward": Case(
        "aten::native_batch_norm_backward", _batch_backward, _images(False, 3, True)
    ),
    "batch_norm nhwc": Case("aten::native_batch_norm", _batch_forward, _images(True, 2, False)),
    "batch_norm nhwc backward": Case(
        "aten::native_batch_norm_backward", _batch_backward, _images(True, 3, True)
    ),
    "group_norm": Case(
        "aten::native_group_norm", _group_forward, _images(False, 2, False, wide=False)
    ),
    "gelu": Case("aten::gelu", lambda x: aten.gelu(x), _rows(16384, 8192)),
    "gelu backward": Case(
        "aten::gelu_backward", lambda grad, x: aten.gelu_backward(grad, x), _rows(16384, 8192, 2)
    ),
    "swiglu": Case("(Tensor gate, Tensor up) -> Tensor", swiglu, _rows(16384, 8192, 2)),
    "swiglu backward": Case(
        "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        swiglu_backward,
        _rows(16384, 8192, 3),
    ),
    "dropout_add": Case(
        "(Tensor data, Tensor other, Tensor draws) -> Tensor", dropout_add, _rows(16384, 8192, 3)
    ),
    "sum of rows": Case("aten::sum.dim_IntList", lambda x: x.sum(1), _rows(16384, 8192)),
    "sum of columns": Case("aten::sum.dim_IntList", lambda x: x.sum(0), _rows(16384, 8192)),
    "var of rows": Case("aten::var.correction", lambda x: x.var(1), _rows(16384, 8192)),
    "var of short rows": Case("aten::var.correction", lambda x: x.var(1), _rows(1 << 20, 128)),
}
