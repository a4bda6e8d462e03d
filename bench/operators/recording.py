"""How much slower a program is while its calls are recorded.

    python -m bench.operators.recording [--model poolformer_s12] [--rounds 25] [--threads 1]

The demo's model on CPU, a pass plain and a pass within `eagercache.record`, by turns; nothing else
is enabled, so that the difference is the recording. Printed are both medians, the ratio of
neighbouring passes with its quartiles, and the calls recorded a pass. The exit status says whether
the median is within the bar.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import eagercache
import torch

from bench.shared import frame

sys.path.append(str(frame.ROOT / "examples"))

import demo

BAR = 1.05


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="poolformer_s12")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    frame.pin()
    torch.set_num_threads(options.threads)
    run = demo.make_model(options.model, options.batch)

    def once() -> float:
        begin = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - begin

    plain, recorded = [], []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        once()
        for number in range(options.rounds + 1):
            with eagercache.record(path) as recording:
                run()  # its own first calls are not the program's pace
                inside = once()
            outside = once()
            if number:  # the first round warms up
                recorded.append(inside)
                plain.append(outside)
        calls = recording.calls // 2
    ratios = [a / b for a, b in zip(recorded, plain, strict=True)]
    low, ratio, high = frame.quartiles(ratios)
    where = frame.machine()
    print(
        f"{options.model}, batch {options.batch}: {frame.quartiles(plain)[1] / 1e6:.2f} ms plain, "
        f"{frame.quartiles(recorded)[1] / 1e6:.2f} ms recorded, x{ratio:.3f} ({low:.3f} to "
        f"{high:.3f}), {calls} calls a pass; {where['processor']}, load {where['load']}, torch "
        f"{where['torch']}, commit {where['commit']}"
    )
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
