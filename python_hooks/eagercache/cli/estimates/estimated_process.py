"""What `eagercache estimate` records in a process of the program, which runs natively."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from eagercache.base.load import core
from eagercache.base.operators import described_name
from eagercache.frontend import recording


class _Times(threading.local):
    """How deep this thread is in calls of modules, and what the outermost ones took."""

    depth = 0


class _Recording:
    """Seconds of outermost calls of modules, by class, and of backward passes. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = _Times()
        self.modules: dict[tuple[str, bool], list[float]] = {}  # [calls, seconds]
        self.backward = 0.0

    def begin(self) -> None:
        """Stands before `torch.nn.Module.__call__` and `torch.autograd.backward` from now on."""
        torch.nn.Module.__call__ = self._timed_call(torch.nn.Module.__call__)
        torch.autograd.backward = self._timed_backward(torch.autograd.backward)

    def _timed_call(self, original: Any) -> Any:
        here = self._thread

        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A single operator of torch's in a module's clothes is counted as an operator.
            if (
                is_dynamo_compiling()
                or here.depth
                or (type(module).__module__.startswith("torch.") and not module._modules)
            ):
                return original(module, *args, **kwargs)
            here.depth += 1
            began = time.perf_counter()
            try:
                return original(module, *args, **kwargs)
            finally:
                here.depth -= 1
                self._add(module, time.perf_counter() - began)

        return call

    def _timed_backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                with self._lock:
                    self.backward += time.perf_counter() - began

        return backward

    def _add(self, module: torch.nn.Module, seconds: float) -> None:
        kind = type(module)
        gradients = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in module.parameters()
        )
        with self._lock:
            row = self.modules.setdefault(
                (f"{kind.__module__}.{kind.__qualname__}", gradients), [0, 0.0]
            )
            row[0] += 1
            row[1] += seconds


def begin(began: float) -> Callable[[], dict[str, Any]]:
    """Records from now on; what it returns says at the end of the process what was met.

    ``began`` is when the process began, by `time.monotonic`. To be called before `enable()`.
    """
    seen = _Recording()
    recording.listen()
    seen.begin()
    return lambda: _report(seen, time.monotonic() - began)


def _report(seen: _Recording, wall_seconds: float) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for text, _ in core.recorded_calls() if core is not None else ():
        row = json.loads(text)
        calls.append(
            {
                "op": described_name(row),
                "dispatch_key": row["dispatch_key"],
                "calls": row["calls"],
                "native_ns": row.get("native_ns"),
            }
        )
    return {
        "wall_seconds": wall_seconds,
        "threads": torch.get_num_threads(),
        "calls": calls,
        "modules": [
            {"name": name, "gradients": gradients, "calls": int(count), "seconds": seconds}
            for (name, gradients), (count, seconds) in seen.modules.items()
        ],
        "backward_seconds": seen.backward,
    }
