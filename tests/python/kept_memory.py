"""What a call keeps for its backward (also for bench/modules/modules_training.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def kept_bytes(call: Callable[[], Any], device: str = "cpu") -> int:
    """Memory that a call has made and not given back while its answer and its graph are there."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        answer = call()
        after = torch.cuda.memory_allocated()
        del answer
        return after - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        answer = call()
    events = recorded.profiler.kineto_results.events()
    del answer
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
