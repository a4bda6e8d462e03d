"""Code that asks whether it is being compiled is traced as eager runs it.

TorchDynamo has a list of the functions that say so, and answers "yes" while it traces. A kernel
stands for eager's call, where they all answer "no". PyTorch's own code keeps the "yes", with which
it leaves out what no trace can have (hooks, checks), and so does transformers', which leaves out
shortcuts that depend on data and give equal answers. Ours keeps it too: what stands around a
module's call steps aside by it, where a process that has it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_TRACED_OTHERWISE = frozenset(("torch", "transformers", "eagercache"))
# Functions here ask for whoever calls them, who need not be transformers.
_ASKS_FOR_OTHERS = "transformers.utils.import_utils"


def eagers_own(undo: ExitStack) -> None:
    """Until ``undo`` is closed the program's code is told what eager's call is told."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions

    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function, traced in tracing_state_functions().items():
        if traced:
            undo.callback(handlers.__setitem__, function, handlers[function])
            handlers[function] = _told_no(handlers[function])


def _told_no(handler: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables.constant import ConstantVariable

    def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        asker = tx
        while asker.f_globals.get("__name__") == _ASKS_FOR_OTHERS and asker.parent is not None:
            asker = asker.parent
        if str(asker.f_globals.get("__name__", "")).partition(".")[0] in _TRACED_OTHERWISE:
            return handler(variable, tx, *args, **kwargs)
        return ConstantVariable.create(False)

    return answer
