"""The call of a module that a request describes, made in the worker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eagercache.callables.module_identity import Unfit
from eagercache.callables.module_transfer import Transferred, unpacked
from eagercache.callables.surroundings import Listener, attention_order, autocast
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.calls.description import decode_state
from eagercache.worker.inductor.commands import CompileRefused

MAX_FUNCTIONS = 400


@contextlib.contextmanager
def rebuilt_call(
    description: Mapping[str, Any], *, gradients: bool = False
) -> Iterator[Transferred]:
    """The module and its arguments, under the global state that the call was made under.

    From now on this process imports what the program's `sys.path` leads to, too: the module's
    classes are there. A refusal is told what the forward read.
    """
    for path in description["python_path"]:
        if path not in sys.path:
            sys.path.append(path)
    with (
        decode_state(description).applied(),
        attention_order(description.get("attention")),
        torch.set_grad_enabled(gradients),
        unpacked(description["payload"]) as rebuilt,
    ):
        rebuilt.key = bytes.fromhex(description.get("key", ""))
        try:
            yield rebuilt
        except CompileRefused as refused:
            with autocast(description["autocast"]):
                refused.read = _read(rebuilt, skips_operators=not gradients)
            raise


def _read(rebuilt: Transferred, *, skips_operators: bool) -> list[list[str]] | None:
    """The functions and variables that the forward reads, of which any may be why it is refused.

    It runs once more for that. None where what ran cannot be named in another process.
    """
    with (
        contextlib.suppress(Exception),
        contextlib.redirect_stdout(Listener()),
        contextlib.redirect_stderr(Listener()),
        FunctionRecorder(skips_operators=skips_operators) as recorder,
    ):
        rebuilt.run()
    try:
        used = recorder.used(rebuilt.module, rebuilt.objects.found)
        rows = [*(function.to_row() for function in used), *recorder.environment()]
    except Unfit:
        return None
    return rows if len(rows) <= MAX_FUNCTIONS else None
