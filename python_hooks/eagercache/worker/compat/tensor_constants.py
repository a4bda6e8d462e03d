"""Values that are known while TorchDynamo traces, as its variables."""

from __future__ import annotations

from typing import Any

import torch


def as_variable(found: Any) -> Any:
    """A number, or a list of such: a new one in each call."""
    from torch._dynamo.variables import ConstantVariable, ListVariable
    from torch._dynamo.variables.base import ValueMutationNew

    if isinstance(found, list):
        parts = [as_variable(part) for part in found]
        return ListVariable(parts, mutation_type=ValueMutationNew())
    return ConstantVariable.create(found)


def as_tensor(tx: Any, found: torch.Tensor) -> Any:
    """A new tensor with these values, in the graph."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    like = {"dtype": found.dtype, "device": found.device}
    given = {name: ConstantVariable.create(value) for name, value in like.items()}
    flat = [as_variable(found.flatten().tolist())]
    made = TorchInGraphFunctionVariable(torch.tensor).call_function(tx, flat, given)
    if found.dim() == 1:
        return made
    shape = [ConstantVariable.create(size) for size in found.shape]
    return made.call_method(tx, "reshape", shape, {})
