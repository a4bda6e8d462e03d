"""The hooks beside a torch that nobody has tried, in a copy of this process: a tenth of a second.

The extension module is loaded, takes hooks and sees calls that native answers. What does not fit
may end the process that tries it, and a process of its own would import torch for seconds: so it is
a fork of this one, which has no other threads and ends with it. What kernels compute is another
check's (`whole_check`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import time
import warnings
from typing import Any

# A copy of a process whose threads held locks may never end.
LIMIT_S = 5.0
_NAMES = (("aten::var", "correction"), ("aten::add", "out"), ("aten::mul_", "Tensor"))


def problem() -> tuple[str, bool]:
    """What is wrong, or ""; and whether it would be found again."""
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, from Python 3.12 on
            child = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return f"there is no process for it ({error})", False
    if child == 0:
        _answer(writer)
    os.close(writer)
    try:
        text = _read(reader, time.monotonic() + LIMIT_S)
    finally:
        os.close(reader)
    if text is None:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    status = _status(child)
    if text is None:
        return f"its hooks did not answer within {LIMIT_S:.0f} s, and are tried again", False
    if text:
        return str(json.loads(text)), True
    if os.WIFSIGNALED(status):
        return f"its hooks ended by signal {os.WTERMSIG(status)}", True
    return "its hooks ended the process", True


def _answer(writer: int) -> None:
    """In the copy: writes what is wrong, and ends it without a step of the program's."""
    try:
        try:
            found = check()
        except BaseException as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        os.write(writer, json.dumps(found).encode())
    finally:
        os._exit(0)


def check() -> str:
    """What is wrong with the hooks, or "". The process is good for nothing else afterwards."""
    import torch

    core: Any = importlib.import_module("eagercache._C")
    x = torch.arange(6144, dtype=torch.float32).reshape(64, 96).sin()

    def calls() -> list[torch.Tensor]:
        out = torch.empty(64, 96)
        torch.add(x, x, alpha=0.5, out=out)
        return [torch.var(x, -1), out, x.clone().mul_(x)]

    with torch.inference_mode():
        native = calls()
        core.set_policy("native", "faster", "accurate", replicas=False, shape_classes=True)
        for operator, overload in _NAMES:
            core.register(operator, overload, "CPU")
            core.set_active(operator, overload, "CPU", True)
        if not core.set_answering(True):
            return "hooks do not answer"
        for _ in range(3):
            for answer, expected in zip(calls(), native, strict=True):
                if not torch.equal(answer, expected):
                    return "an answer through a hook differs from native's"
    counted = {row["op"]: row["misses"] + row["pending"] for row in core.operator_stats()}
    unseen = [name for name, overload in _NAMES if not counted.get(f"{name}.{overload}")]
    return f"no hook saw a call of {', '.join(unseen)}" if unseen else ""


def _read(reader: int, end: float) -> bytes | None:
    """What was written until the other side was closed; None where that did not happen in time."""
    text = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 4096)
        if not part:
            return text
        text += part


def _status(child: int) -> int:
    """Of a process that has ended; 0 where the program has it that nobody is told."""
    try:
        return os.waitpid(child, 0)[1]
    except ChildProcessError:
        return 0
