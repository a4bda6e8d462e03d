"""Functions of torch that TorchDynamo calls while it traces, to go on with what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Of the names in Dynamo's own list these depend on their arguments alone, on torch's build, or on
# what the key of a call has. Names, since not every version has each.
_SETTLED = frozenset(
    (
        "_assert",
        "_is_any_autocast_enabled",
        "_is_checkpoint_valid",
        "_get_privateuse1_backend_name",
        "get_autocast_dtype",
        "get_autocast_gpu_dtype",
        "get_default_dtype",
        "get_enum",
        "is_autocast_cache_enabled",
        "is_autocast_cpu_enabled",
        "is_autocast_enabled",
        "is_built",
        "is_complex",
        "is_floating_point",
        "promote_types",
    )
)
# Transforms are another dispatch state, in which no kernel answers.
_NO_IN_ANY_CALL = torch._C._are_functorch_transforms_active
# Of a worker for a GPU these are the program's; one for the CPU sees no GPU, if there are any.
_OF_GPU = frozenset((torch.cuda.is_available, torch.cuda.is_initialized))
_DEVICES = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg")))


def is_run_by_worker(called: Any, given: Any, named: Any, result: Any) -> bool:
    """Whether a call that Dynamo put into its graph came back as a plain value of the worker's.

    So do what it has no rule for (`torch._C._get_...`): from plain values, and without a guard.
    ``called`` and the others are Dynamo's variables.
    """
    values = [*given, *named.values()]
    if not all(value.is_python_constant() for value in values) or not result.is_python_constant():
        return False
    known = called.can_constant_fold_through() or called.value in called._get_handlers()
    known = known or called.value is _NO_IN_ANY_CALL
    return not known and result.as_python_constant() is not None


def is_answered_by_worker(function: Any) -> bool:
    """Whether a trace has the worker's own answer, which need not be the program's.

    That is so of all that Dynamo folds and that is not known better: a process group, a device.
    """
    from torch._dynamo.variables import torch as dynamo

    try:
        if function not in dynamo.constant_fold_functions:
            return False
    except TypeError:  # not hashable: none of them
        return False
    if function is torch.distributed.is_available:
        return False
    if function in _OF_GPU:
        return not torch.cuda.is_available() and any(path.exists() for path in _DEVICES)
    return getattr(function, "__name__", "") not in _SETTLED
