"""eagercache: compiled kernels for eager PyTorch, call by call, from a persistent cache.

    import torch, eagercache
    eagercache.enable()

Hot operators move to compiled kernels as those become ready; native kernels answer until then and
wherever they are faster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from eagercache.explanation import Explanation, explain
from eagercache.report import KernelInfo, OperatorStats, Stats, kernels, stats
from eagercache.version import __version__

if TYPE_CHECKING:
    from eagercache.custom_operators import CustomOperator, op
    from eagercache.recording import Recording, record
    from eagercache.warm import WarmError, WarmReport, warm_up

__all__ = [
    "CustomOperator",
    "Enabled",
    "Explanation",
    "KernelInfo",
    "OperatorStats",
    "Recording",
    "Stats",
    "WarmError",
    "WarmReport",
    "__version__",
    "accelerate",
    "available",
    "cmake_prefix_path",
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
    "record",
    "register",
    "stats",
    "wait",
    "warm_up",
]

# Below it find_package(eagercache) finds the package for C++ programs.
cmake_prefix_path = str(Path(__file__).parent)

# What programs that only run need not import.
_LATER = {
    **dict.fromkeys(("CustomOperator", "op"), "eagercache.custom_operators"),
    **dict.fromkeys(("Recording", "record"), "eagercache.recording"),
    **dict.fromkeys(("WarmError", "WarmReport", "warm_up"), "eagercache.warm"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'eagercache' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value
