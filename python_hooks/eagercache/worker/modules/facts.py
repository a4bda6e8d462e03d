"""What the entry of a module's kernel says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from eagercache.callables.arguments import stand_in
from eagercache.callables.module_transfer import Transferred
from eagercache.calls.trace_rows import rows_text
from eagercache.worker.modules.comparison import tensor_leaves
from eagercache.worker.modules.trace import ModuleGraph

if TYPE_CHECKING:
    from eagercache.worker.modules.training_graphs import TrainingGraphs


def kernel_facts(
    form: str,
    traced: ModuleGraph | TrainingGraphs,
    strides: list[list[int]],
    functions: list[list[str]],
    numerics: str,
    errors: tuple[float, float],
) -> dict[str, str]:
    """What an entry says of its kernel. ``errors``: the kernel's and the forward's."""
    return {
        **call_facts(form, traced),
        "device": traced.device.type,
        "numerics": numerics,
        "output_strides": json.dumps(strides),
        "functions": rows_text([*functions, *map(list, traced.guards)]),
        "largest_error": f"{errors[0]:.4g}",
        "native_error": f"{errors[1]:.4g}",
    }


def call_facts(form: str, traced: ModuleGraph | TrainingGraphs) -> dict[str, str]:
    """Those of them that say how the kernel is called."""
    drawn = traced.noise if isinstance(traced, ModuleGraph) else ()  # else the plan has it
    noise = {"noise": json.dumps([one.row() for one in drawn])} if drawn else {}
    return {
        **noise,
        "form": form,
        "inputs": json.dumps([[int(kind), index] for kind, index in traced.inputs]),
        "ranges": json.dumps(traced.ranges),
        "outputs": traced.outputs,
        "writes": json.dumps([[int(kind), index, times] for kind, index, times in traced.writes]),
        "checks": str(int(traced.checks)),
    }


def output_strides(rebuilt: Transferred, outputs: str) -> list[list[int]]:
    """Those of the tensors that a kernel makes for the call.

    ``outputs``: how the answer is built of them, which says where one stands for a count.
    """
    made = iter(tensor_leaves(rebuilt.run()))
    strides = []
    for leaf in json.loads(outputs)["leaves"]:
        if "count" in leaf:
            strides.append(list(stand_in(0).stride()))
        elif "tensor" in leaf:
            strides.append(list(next(made).stride()))
        elif "detached" in leaf:
            next(made)
    return strides
