"""Whether a compile worker may use a GPU beside the program that runs on it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# What a worker holds besides its tensors: the context, and Triton's and PyTorch's modules.
CONTEXT_BYTES = 1 << 30
# Copies of the call's tensors that proof and timing hold at once, references in float64 included.
COPIES = 12
# The same of a module's tensors and arguments: the rebuilt ones, copies of them, and a float64 one.
MODULE_COPIES = 8
RESERVED_BYTES = 2 << 30
DEFAULT_COMPUTE_MODE = 0  # CU_COMPUTEMODE_DEFAULT


def gpu_of(description: Mapping[str, Any]) -> int:
    """The GPU that a described operator's call is on, or makes its result on."""
    devices = _devices(description)
    return next((int(name[5:]) for name in devices if name.startswith("cuda:")), 0)


def on_first_gpu(value: Any) -> Any:
    """A description as a worker needs it, which sees one GPU: that of the call."""
    if isinstance(value, str):
        return "cuda:0" if re.fullmatch(r"cuda:\d+", value) else value
    if isinstance(value, Mapping):
        return {name: on_first_gpu(part) for name, part in value.items()}
    return [on_first_gpu(part) for part in value] if isinstance(value, list) else value


def reason_to_stay_off(description: Mapping[str, Any], core: Any) -> str:
    """Why no worker may compile an operator's call; empty when one may.

    A worker needs free memory of three times its need and 2 GiB, and a GPU that several processes
    may use. Called in a process that has CUDA tensors.
    """
    import torch

    devices = {name for name in _devices(description) if name.startswith("cuda")}
    wanted = bytes_wanted(description)
    reasons = (_reason(torch.device(device).index or 0, wanted, core) for device in devices)
    return next(filter(None, reasons), "")


def reason_to_stay_off_module(index: int, tensor_bytes: int, core: Any) -> str:
    """The same for a module's call whose tensors on GPU ``index`` hold ``tensor_bytes``.

    Its need is known better, being mostly its own tensors: half as much again must be free.
    """
    return _reason(index, _wanted_by_module(tensor_bytes), core)


def bytes_wanted(description: Mapping[str, Any]) -> int:
    """What must be free on a GPU before a worker may compile a described call there."""
    if description.get("kind") == "module":
        return _wanted_by_module(int(description["tensor_bytes"]))
    tensors = _tensors(description.get("args", ()))
    return 3 * (CONTEXT_BYTES + COPIES * sum(map(_bytes, tensors))) + RESERVED_BYTES


def _wanted_by_module(tensor_bytes: int) -> int:
    need = CONTEXT_BYTES + MODULE_COPIES * tensor_bytes
    return need + need // 2 + RESERVED_BYTES


def _reason(index: int, wanted: int, core: Any) -> str:
    import torch

    mode = core.cuda_compute_mode(index)
    if mode != DEFAULT_COMPUTE_MODE:
        return f"GPU {index} is in an exclusive compute mode ({mode})"
    free, _ = torch.cuda.mem_get_info(index)
    if free < wanted:
        return (
            f"GPU {index} has {free >> 20} MiB free; compiling this call wants {wanted >> 20} MiB"
        )
    return ""


def _devices(description: Mapping[str, Any]) -> Iterator[str]:
    """Of the tensors, then what an argument names."""
    arguments = description.get("args", ())
    yield from (tensor["device"] for tensor in _tensors(arguments))
    yield from (argument["device"] for argument in arguments if argument.get("kind") == "device")


def _tensors(arguments: Any) -> Iterator[Mapping[str, Any]]:
    for argument in arguments:
        if argument.get("kind") == "tensor":
            yield argument
        elif argument.get("kind") == "tensor_list":
            yield from _tensors(argument["elements"])


def _bytes(tensor: Mapping[str, Any]) -> int:
    import torch

    return int(math.prod(tensor["sizes"])) * getattr(torch, tensor["dtype"]).itemsize
