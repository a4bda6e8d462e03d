"""The call of a module that a request describes, made in the worker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eagercache.callables.module_transfer import Transferred, unpacked
from eagercache.callables.surroundings import attention_order
from eagercache.calls.description import decode_state


@contextlib.contextmanager
def rebuilt_call(
    description: Mapping[str, Any], *, gradients: bool = False
) -> Iterator[Transferred]:
    """The module and its arguments, under the global state that the call was made under.

    From now on this process imports what the program's `sys.path` leads to, too: the module's
    classes are there.
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
        yield rebuilt
