"""How code and objects of the program are pickled, where cloudpickle alone does not know how."""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch
from torch._ops import _OpNamespace, _Ops


class Packer(cloudpickle.Pickler):
    """cloudpickle's, for what is met in programs of PyTorch, too.

    ``torch.ops`` and its namespaces are modules that no import finds: a script with
    ``aten = torch.ops.aten`` has them among its globals.
    """

    def reducer_override(self, value: Any) -> Any:
        """What is not pickled as it says itself."""
        if isinstance(value, _Ops):
            return getattr, (torch, "ops")
        if isinstance(value, _OpNamespace):
            return getattr, (torch.ops, value.name)
        return super().reducer_override(value)
