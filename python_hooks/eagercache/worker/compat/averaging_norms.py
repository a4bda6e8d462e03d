"""Batch norms that average over all batches (`momentum=None`), in traces.

The share of a batch is a number that is read of a counter, which PyTorch's operator cannot take
while it is traced. Its parts can.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch.nn import functional


def notice(undo: contextlib.ExitStack) -> None:
    """Until ``undo`` is closed, such a norm is traced as its parts."""
    from torch._dynamo.variables import SymNodeVariable
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    original = TorchInGraphFunctionVariable.call_function

    @functools.wraps(original)
    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.value is functional.batch_norm:
            given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
            if isinstance(given.get("momentum"), SymNodeVariable):
                by_parts = SourcelessBuilder.create(tx, _by_parts)
                return by_parts.call_function(tx, [], given)
        return original(variable, tx, args, kwargs)

    TorchInGraphFunctionVariable.call_function = call_function
    undo.callback(setattr, TorchInGraphFunctionVariable, "call_function", original)


# In the order of `torch.nn.functional.batch_norm`.
_PARAMETERS = tuple(inspect.signature(functional.batch_norm).parameters)


def _by_parts(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training or running_mean is None or running_var is None:
        statistics = (running_mean, running_var)
        return functional.batch_norm(input, *statistics, weight, bias, training, 0.0, eps)
    answer = functional.batch_norm(input, None, None, weight, bias, True, 0.0, eps)
    axes = [0, *range(2, input.dim())]
    var, mean = torch.var_mean(input.detach().to(running_mean.dtype), axes, correction=1)
    running_mean.copy_(mean * momentum + running_mean.detach() * (1.0 - momentum))
    running_var.copy_(var * momentum + running_var.detach() * (1.0 - momentum))
    return answer
