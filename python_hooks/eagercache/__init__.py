"""eagercache: compiled kernels for eager PyTorch, call by call, from a persistent cache.

    import torch, eagercache
    eagercache.enable()

Hot operators move to compiled kernels as those become ready; native kernels answer until then and
wherever they are faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagercache.base.command_line import IS_COMMAND_LINE
from eagercache.version import __version__

# The command line imports what a command needs: that it begins at once is worth more there.
if TYPE_CHECKING or not IS_COMMAND_LINE:
    from eagercache.base.load import available, cmake_prefix_path
    from eagercache.frontend.api import (
        Enabled,
        accelerate,
        default_operators,
        disable,
        enable,
        freeze,
        is_enabled,
        is_frozen,
        register,
    )
    from eagercache.frontend.explanation import Explanation, explain
    from eagercache.frontend.gains import ModuleTotals
    from eagercache.frontend.metrics import MetricsCollector, metrics
    from eagercache.frontend.module_report import ModuleInfo, ModuleReport, explain_module
    from eagercache.frontend.report import (
        KernelInfo,
        KernelList,
        OperatorStats,
        RemoteStats,
        Stats,
        kernels,
        stats,
    )
    from eagercache.frontend.waiting import wait

if TYPE_CHECKING:
    from eagercache.ahead.errors import WarmError
    from eagercache.ahead.report import WarmReport
    from eagercache.ahead.warm import warm_up
    from eagercache.callables.custom_operators import op
    from eagercache.callables.function_operator import CustomOperator
    from eagercache.deploy.artifact import ArtifactInfo, load_module, verify_module
    from eagercache.deploy.deployed_module import DeployedModule
    from eagercache.deploy.errors import DeployError
    from eagercache.deploy.export import Exported, export_module
    from eagercache.deploy.tensors import ConstantInfo, TensorInfo
    from eagercache.frontend.recording import Recording, record
    from eagercache.remote.plan import Remote

__all__ = [
    "ArtifactInfo",
    "ConstantInfo",
    "CustomOperator",
    "DeployError",
    "DeployedModule",
    "Enabled",
    "Explanation",
    "Exported",
    "KernelInfo",
    "KernelList",
    "MetricsCollector",
    "ModuleInfo",
    "ModuleReport",
    "ModuleTotals",
    "OperatorStats",
    "Recording",
    "Remote",
    "RemoteStats",
    "Stats",
    "TensorInfo",
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
    "export_module",
    "freeze",
    "is_enabled",
    "is_frozen",
    "kernels",
    "load_module",
    "metrics",
    "op",
    "record",
    "register",
    "stats",
    "verify_module",
    "wait",
    "warm_up",
]

# What programs that only run need not import; the command line has all of it later.
_LATER = {
    **dict.fromkeys(("available", "cmake_prefix_path"), "eagercache.base.load"),
    **dict.fromkeys(
        (
            "Enabled",
            "accelerate",
            "default_operators",
            "disable",
            "enable",
            "freeze",
            "is_enabled",
            "is_frozen",
            "register",
        ),
        "eagercache.frontend.api",
    ),
    **dict.fromkeys(("Explanation", "explain"), "eagercache.frontend.explanation"),
    **dict.fromkeys(
        ("ModuleInfo", "ModuleReport", "explain_module"), "eagercache.frontend.module_report"
    ),
    **dict.fromkeys(
        ("KernelInfo", "KernelList", "OperatorStats", "RemoteStats", "Stats", "kernels", "stats"),
        "eagercache.frontend.report",
    ),
    "ModuleTotals": "eagercache.frontend.gains",
    "MetricsCollector": "eagercache.frontend.metrics",
    "metrics": "eagercache.frontend.metrics",
    "wait": "eagercache.frontend.waiting",
    "CustomOperator": "eagercache.callables.function_operator",
    "op": "eagercache.callables.custom_operators",
    **dict.fromkeys(("ArtifactInfo", "load_module", "verify_module"), "eagercache.deploy.artifact"),
    **dict.fromkeys(("ConstantInfo", "TensorInfo"), "eagercache.deploy.tensors"),
    "DeployError": "eagercache.deploy.errors",
    "DeployedModule": "eagercache.deploy.deployed_module",
    **dict.fromkeys(("Exported", "export_module"), "eagercache.deploy.export"),
    **dict.fromkeys(("Recording", "record"), "eagercache.frontend.recording"),
    "Remote": "eagercache.remote.plan",
    "WarmError": "eagercache.ahead.errors",
    "WarmReport": "eagercache.ahead.report",
    "warm_up": "eagercache.ahead.warm",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'eagercache' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
