"""Tries hooks, a kernel and a module against native: `python -m eagercache.base.self_check DIR`.

DIR is an empty folder for a store. Prints one line of JSON: `problem`, "" where all is well, and
`lasting`, whether it would be found again. See `untried_torch`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def check(store: Path, compiles: bool) -> str:
    """What is wrong, or ""; without a compiler the hooks alone are tried."""
    import torch

    import eagercache

    torch.manual_seed(0)
    x = torch.randn(64, 96)
    layers = [torch.nn.LayerNorm(96), torch.nn.Linear(96, 32), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 96)).eval()

    def calls() -> list[torch.Tensor]:
        out = torch.empty(64, 96)
        torch.add(x, x, alpha=0.5, out=out)
        changed = x.clone().mul_(2.0)
        return [torch.var(x, -1), out, changed, model(x)]

    with torch.inference_mode():
        native = calls()
        chosen: dict[str, Any] = {"on_miss": "wait", "choose": "always", "modules": "Sequential"}
        if not compiles:
            chosen = {"on_miss": "native"}
        names = ["var.correction", "add.out", "mul_.Tensor"]
        with eagercache.enable(names, cache_dir=store, **chosen):
            for _ in range(3):
                answers = calls()
                for answer, expected in zip(answers, native, strict=True):
                    if not torch.allclose(answer, expected, rtol=1e-4, atol=1e-5):
                        return "an answer differs from native's"
            seen = eagercache.stats()
            if not seen.hits + seen.misses + seen.native:
                return "no hook saw a call"
            return _of_kernels() if compiles else ""


def _of_kernels() -> str:
    """Whether kernels answered, an operator's and the module's."""
    import eagercache

    kernels = eagercache.kernels()
    if not any(kernel.decision == "kernel" for kernel in kernels):
        reasons = [kernel.reason for kernel in kernels if kernel.reason]
        return f"no operator has a kernel: {(reasons or ['none was compiled'])[0]}"
    if not any(row.hits for row in eagercache.stats().modules.values()):
        return "the kernel of a module did not answer"
    return ""


def _has_compiler() -> bool:
    from eagercache.base import config, toolchain

    try:
        toolchain.find_compiler(config.read_settings().cxx)
    except toolchain.ToolchainError:
        return False
    return True


def main() -> None:
    """The command line."""
    with contextlib.redirect_stdout(sys.stderr):  # the verdict is all that is on standard output
        try:
            problem = check(Path(sys.argv[1]), _has_compiler())
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(json.dumps({"problem": problem, "lasting": True}))


if __name__ == "__main__":
    main()
