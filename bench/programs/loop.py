"""What the programs of this folder share: options, sizes, and how many steps they take.

Nothing here knows of eagercache. A program whose library is missing says so in one line and ends
with status 3.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

NOT_INSTALLED = 3
# Lines that a whole run prints, so that it is seen from outside how far it is.
_LINES = 40
# Before these, what is made at first use is still being made.
_FIRST_STEPS = 3


class Program:
    """The command line of a program.

    Attributes:
        device: where tensors belong.
        size: the numbers of SIZES for this run.
        steps: how many there are.
    """

    def __init__(
        self,
        description: str,
        sizes: Mapping[str, Mapping[str, Any]],
        steps: Mapping[str, int],
    ) -> None:
        """``sizes`` and ``steps`` are by "tiny", "cpu" and "cuda"."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        parser.add_argument("--steps", type=int, help="instead of those of its size")
        parser.add_argument("--tiny", action="store_true", help="the smallest sizes")
        parser.add_argument(
            "--calibrate", type=float, metavar="SECONDS",
            help="take steps for so long, print how many there were, and end",
        )  # fmt: skip
        options = parser.parse_args()
        kind = "tiny" if options.tiny else options.device
        self.device = torch.device(options.device)
        self.size = argparse.Namespace(**sizes[kind])
        self.steps = int(options.steps or steps[kind])
        self._calibrate: float | None = options.calibrate
        self._every = max(1, self.steps // _LINES)
        torch.manual_seed(0)

    def each_step(self) -> Iterator[int]:
        """The numbers of the steps; ends the program where it is only asked how fast it is."""
        if self._calibrate is None:
            yield from range(self.steps)
            return
        began = None
        step = 0
        while True:
            if step == _FIRST_STEPS:
                self._synchronize()
                began = time.perf_counter()
            elif began is not None and time.perf_counter() - began >= self._calibrate:
                break
            yield step
            step += 1
        self._synchronize()
        seconds = time.perf_counter() - began
        print(json.dumps({"steps": step - _FIRST_STEPS, "seconds": seconds}), flush=True)
        sys.exit(0)

    def says(self, step: int) -> bool:
        """Whether this step's numbers are printed."""
        return self._calibrate is None and (
            step % self._every == self._every - 1 or step == self.steps - 1
        )

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU, nothing on a CPU."""
        enabled = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def say(step: int, **numbers: float | torch.Tensor) -> None:
    """Prints the numbers of a step."""
    plain = {k: float(v.detach() if torch.is_tensor(v) else v) for k, v in numbers.items()}
    print(f"step {step}", *(f"{name} {value:.6g}" for name, value in plain.items()))


def library(name: str) -> Any:
    """The module; ends the program where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed")
        sys.exit(NOT_INSTALLED)
