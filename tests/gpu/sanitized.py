"""Calls that kernels answer, for compute-sanitizer: `scripts/gpu_check --sanitize`.

    python tests/gpu/sanitized.py warm     compiles what the other one needs
    python tests/gpu/sanitized.py          each call by its kernel, and native beside it

Every allocation is one of the driver's (PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set), so that an access
beyond a tensor is one beyond its memory. Sizes are odd, so that the last block of each kernel is
partly masked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

if "warm" not in sys.argv:
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import eagercache
import torch

F = torch.nn.functional


def rand(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator).to(dtype).cuda()


def calls() -> dict[str, Callable[[], Any]]:
    """By the operator whose hits they add to."""
    a, b = rand(67, 385), rand(67, 385)
    half, image = rand(67, 385, dtype=torch.bfloat16), rand(5, 7, 13, 11)
    weight, bias = rand(385), rand(385)

    def norm_backward() -> Any:
        x = a.detach().requires_grad_()
        w, v = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        return torch.autograd.grad(F.layer_norm(x, (385,), w, v), [x, w, v], b)

    def batch_norm() -> Any:
        norm = torch.nn.BatchNorm2d(7).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            y = norm(image.to(torch.bfloat16).requires_grad_())
        return [y, norm.running_mean, norm.running_var]

    return {
        "aten::abs": lambda: torch.abs(a),
        "aten::add.Tensor": lambda: a + b,
        "aten::mul.Tensor": lambda: a * 2.5,
        "aten::_softmax": lambda: torch.softmax(a, -1),
        "aten::sum.dim_IntList": lambda: a.sum(0),
        "aten::mean.dim": lambda: half.mean(-1),
        "aten::native_layer_norm_backward": norm_backward,
        "aten::native_batch_norm": batch_norm,
        "aten::cat": lambda: torch.cat([a, b], -1),
        "aten::clone": lambda: a.t().clone(memory_format=torch.contiguous_format),
        "aten::_to_copy": lambda: half.float(),
        "aten::gelu": lambda: F.gelu(half),
        "aten::avg_pool2d": lambda: F.avg_pool2d(image, 3),
        "aten::add_.Tensor": lambda: a.clone().add_(b),
        "aten::relu_": lambda: torch.relu_(b.clone()),
    }


def main() -> None:
    """Fails unless a kernel answered each call, as native does."""
    on_miss = "wait" if "warm" in sys.argv else "native"
    made = calls()
    options: dict[str, Any] = {"devices": ["cuda"], "on_miss": on_miss, "choose": "always"}
    unanswered, different = [], []
    for name, call in made.items():
        eagercache.enable(**options)
        call()
        before = eagercache.stats().operators[f"{name} @CUDA"].hits
        mine = call()
        hit = eagercache.stats().operators[f"{name} @CUDA"].hits > before
        if not hit:
            unanswered.append(name)
        eagercache.disable()
        expected = call()
        try:
            torch.testing.assert_close(mine, expected, rtol=2e-2, atol=1e-2)
        except AssertionError as error:
            different.append(f"{name}: {error}")
    reasons = {k.op: k.reason for k in eagercache.kernels() if k.decision != "kernel"}
    print(f"{len(made) - len(unanswered)} of {len(made)} operators answered by kernels; {reasons}")
    if unanswered or different:
        raise SystemExit(f"no kernel: {unanswered}; different: {different}")


if __name__ == "__main__":
    main()
