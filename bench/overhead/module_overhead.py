"""What a call of an accelerated module costs beside its kernel: tensors of 8 numbers, one kernel.

    python -m bench.overhead.module_overhead [--json]

The kernel itself is some 100 ns of arithmetic, so that the figure of a hit is nearly all overhead:
Module.__call__, the guards of module, parameters and arguments, the container and its output. One
hit is of an exact kernel, one of a kernel with symbolic sizes.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import eagercache
import torch
from eagercache.base.load import core
from eagercache.modules.manager import manager
from torch import nn

from bench.shared import frame

PARAMETERS = 10


class Scales(nn.Module):
    """Ten parameters, and arithmetic that fuses into one loop."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(PARAMETERS):
            self.register_parameter(f"p{index}", nn.Parameter(torch.full((8,), 0.5 + index)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many multiplications."""
        for parameter in self.parameters():
            x = x * parameter
        return x


def measure(options: argparse.Namespace) -> list[frame.Figure]:
    """Eager, a hit of an exact kernel, and one of a kernel with symbolic sizes."""
    assert core is not None
    model = Scales().eval()
    exact, one, other = torch.randn(1, 8), torch.randn(3, 8), torch.randn(4, 8)
    with (
        tempfile.TemporaryDirectory() as store,
        torch.inference_mode(),
    ):
        os.environ["EAGERCACHE_DIR"] = store
        eagercache.enable((), modules="auto", on_miss="background", choose="always")
        for x in (exact, exact, exact, one, other, other):
            model(x)
            eagercache.wait()
        before = sum(row.hits for _, row in manager.stats())
        model(exact), model(other)
        if sum(row.hits for _, row in manager.stats()) != before + 2:
            raise SystemExit("no kernels")

        def by_forward() -> torch.Tensor:
            core.set_modules_active(False)
            try:
                return model(exact)
            finally:
                core.set_modules_active(True)

        return frame.compare(
            {
                f"forward, {PARAMETERS} parameters": by_forward,
                "hit, exact sizes": lambda: model(exact),
                "hit, symbolic sizes": lambda: model(other),
            },
            rounds=options.rounds,
            calls=options.calls,
        )


if __name__ == "__main__":
    frame.main("A call of an accelerated module", measure)
