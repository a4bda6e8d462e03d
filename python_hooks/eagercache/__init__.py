"""eagercache: compiled kernels for eager PyTorch, call by call, from a persistent cache.

    import torch, eagercache
    eagercache.enable()

Hot operators move to compiled kernels as those become ready; native kernels answer until then and
wherever they are faster.
"""

from __future__ import annotations

from eagercache._load import available
from eagercache.api import (
    Enabled,
    accelerate,
    default_operators,
    disable,
    enable,
    explain_module,
    freeze,
    is_enabled,
    is_frozen,
    register,
    wait,
)
from eagercache.custom_operators import CustomOperator, op
from eagercache.explanation import Explanation, explain
from eagercache.report import KernelInfo, OperatorStats, Stats, kernels, stats
from eagercache.version import __version__

__all__ = [
    "CustomOperator",
    "Enabled",
    "Explanation",
    "KernelInfo",
    "OperatorStats",
    "Stats",
    "__version__",
    "accelerate",
    "available",
    "default_operators",
    "disable",
    "enable",
    "explain",
    "explain_module",
    "freeze",
    "is_enabled",
    "is_frozen",
    "kernels",
    "op",
    "register",
    "stats",
    "wait",
]
