"""The demo's last part: a whole model as one kernel, ``enable(modules="auto")``, beside eager.

A process of its own, since the operators' hooks of the others stay. It calls the model until its
kernel is decided, then takes turns, and writes what it saw as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_report as report
import eagercache
import timm
import torch

SEED = 1
ROUNDS = 25
MAX_TIMING_S = 12.0
MIN_ROUNDS = 7
SETTLED_CALLS = 4  # of a module that has its kernel in the cache: looked at, looked up, answered


@dataclass(frozen=True)
class WholeModel:
    """What the process measured.

    Attributes:
        name: the model and its batch.
        native, cached: a pass without and with the kernel.
        seconds: until it was decided.
        compiles: kernels that were made for it here, of the model or of its parts.
        difference, bound: of the outputs, and how large it may be.
        explanation: what became of the model's calls.
    """

    name: str
    native: report.Timing
    cached: report.Timing
    seconds: float
    compiles: int
    difference: float
    bound: float
    explanation: str

    @classmethod
    def of(cls, data: dict[str, Any]) -> WholeModel:
        """Rebuild from the JSON that the process wrote."""
        timings = {name: report.Timing(**data[name]) for name in ("native", "cached")}
        return cls(**{**data, **timings})

    def lines(self) -> list[str]:
        """Return it as sentences."""
        return [
            f"native:          {self.native}",
            f"with eagercache: {self.cached}",
            f"ratio of the medians: x{self.native.median / self.cached.median:.2f} "
            "(passes in turn)",
            f"{self.compiles} compiles, {self.seconds:.0f} s until decided",
            f"largest output difference: {self.difference:.2e} (bound {self.bound:.2e})",
            self.explanation,
        ]


def settle(forward: Callable[[], torch.Tensor], limit: float) -> None:
    """Call the model until nothing is left to decide."""
    begin = time.perf_counter()
    quiet = 0
    while quiet < SETTLED_CALLS and time.perf_counter() - begin < limit:
        forward()
        quiet = quiet + 1 if eagercache.wait(timeout=1.0) else 0


def timed(forward: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one pass."""
    begin = time.perf_counter()
    forward()
    return time.perf_counter() - begin


def measure(name: str, batch: int, cache: Path, limit: float) -> WholeModel:
    """Fill the cache, or read it, and take turns."""
    torch.manual_seed(SEED)
    model = timm.create_model(name, pretrained=False).eval()
    images = torch.randn(batch, *model.default_cfg["input_size"])

    def forward() -> torch.Tensor:
        return model(images)

    with torch.inference_mode():
        native_output = forward()
        eagercache.enable((), modules="auto", cache_dir=cache)
        begin = time.perf_counter()
        settle(forward, limit)
        seconds = time.perf_counter() - begin
        output = forward()
        explanation = eagercache.explain_module(model)[0]
        native: list[float] = []
        cached: list[float] = []
        begin = time.perf_counter()
        for count in range(ROUNDS):
            if count >= MIN_ROUNDS and time.perf_counter() - begin > MAX_TIMING_S:
                break
            eagercache.disable()
            native.append(timed(forward))
            eagercache.enable((), modules="auto", cache_dir=cache)
            settle(forward, limit=5.0)
            cached.append(timed(forward))
        compiles = eagercache.stats().compiles
        eagercache.disable()
        precise = model.double()(images.double())
    # What the proof of a module's kernel allows: twice native's error (and native's own), or one
    # rounding for each step of a pairwise sum over the longest dimension.
    native_error = (native_output.double() - precise).abs().max().item()
    longest = max(size for parameter in model.parameters() for size in parameter.size())
    unit = native_output.abs().max().item() * torch.finfo(native_output.dtype).eps
    return WholeModel(
        name=f"{name}, batch {batch}",
        native=report.Timing.of(native),
        cached=report.Timing.of(cached),
        seconds=seconds,
        compiles=compiles,
        difference=(output - native_output).abs().max().item(),
        bound=max(3.0 * native_error, native_error + math.log2(longest) * unit),
        explanation=explanation,
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--model", default="mobilenetv3_small_100")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to wait, at most")
    options = parser.parse_args()
    result = measure(options.model, options.batch, options.cache, options.limit)
    options.answer.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
