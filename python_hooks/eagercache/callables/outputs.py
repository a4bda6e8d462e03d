"""How an answer is built of its tensors. Imports little: a deployed module opens with it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils import _pytree as pytree


def build_unflatten(outputs: str, num_outputs: int) -> Any:
    """A function of the list of output tensors that makes the answer; None for the tensor itself.

    Raises ValueError for a text that does not describe ``num_outputs`` tensors.
    """
    stored = json.loads(outputs)
    spec = pytree.treespec_loads(stored["spec"])
    leaves = stored["leaves"]
    tensors = [leaf["tensor"] for leaf in leaves if "tensor" in leaf]
    if tensors != list(range(num_outputs)):
        raise ValueError("the outputs are not numbered in order")
    only_tensors = len(tensors) == len(leaves)
    if only_tensors and spec == pytree.tree_structure(0):
        return None
    if only_tensors and spec == pytree.tree_structure((0,) * num_outputs):
        return tuple

    def unflatten(values: list[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(
            [values[leaf["tensor"]] if "tensor" in leaf else leaf["value"] for leaf in leaves],
            spec,
        )

    return unflatten
