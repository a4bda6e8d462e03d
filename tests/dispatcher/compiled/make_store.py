"""Makes a store with kernels for the calls of real_kernel_test.cc and check_gil.py.

Usage: make_store.py STORE
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import eagercache
import torch

OPERATORS = ("aten::var.correction", "aten::aminmax")


def make_calls() -> None:
    """One call for each kernel."""
    x = torch.rand(512, 512)
    torch.ops.aten.var.correction(x, [1], correction=1, keepdim=False)
    torch.ops.aten.aminmax(x, dim=1, keepdim=False)


def main() -> int:
    store = Path(sys.argv[1])
    shutil.rmtree(store, ignore_errors=True)
    with eagercache.enable(OPERATORS, on_miss="wait", choose="always", cache_dir=store):
        make_calls()
        if not eagercache.wait(300):
            print("kernels are still being compiled", file=sys.stderr)
            return 1
    kernels = list(eagercache.kernels())
    for kernel in kernels:
        print(f"{kernel.op}.{kernel.overload}: {kernel.decision} {kernel.reason}")
    made = sum(kernel.decision == "kernel" for kernel in kernels)
    return 0 if made == len(OPERATORS) else 1


if __name__ == "__main__":
    sys.exit(main())
