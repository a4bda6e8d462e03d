"""How far a training run with kernels is from eager's, step by step, beside other roundings.

    python -m bench.modules.drift [--steps 1000] [--output FILE]

A small network (layer norms, GELU, softmax; float32, SGD, one thread, CPU) is trained from one
seed on the same data, each run in a process of its own:

again     eager once more
place N   eager from first weights that differ by at most their last place, with seed N
accurate  kernels of operators, wherever there is one, under numerics="accurate"
bitwise   the same under numerics="bitwise"

The distance of a run from the first eager one, after so many steps, is the root mean square of the
difference of all parameters, divided by that of the parameters themselves; and that of the losses
of the last ten steps. A last place of float32 is 1.2e-7.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.shared import frame

TITLE = "How far training runs are from eager's"
SIDES = ("again", "place 1", "place 2", "place 3", "accurate", "bitwise")
LAST_PLACE = 2.0**-23
BATCHES = 16  # of made-up data, seen again and again, so that there is something to learn
LAST = 10


def marks(steps: int) -> list[int]:
    """After which steps the runs are compared: 1, 10, 100 and so on, and the last."""
    tens = [10**power for power in range(1 + int(math.log10(steps)))]
    return sorted({*tens, steps})


def train(side: str, steps: int) -> dict[str, Any]:
    """One run, in this process: parameters and losses after each mark, and hits of kernels."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()]
    model = nn.Sequential(nn.Linear(32, 64), *block, nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
    model.append(nn.Linear(64, 10))
    images = torch.randn(BATCHES, 64, 32)
    labels = torch.randint(0, 10, (BATCHES, 64))
    if side.startswith("place"):
        generator = torch.Generator().manual_seed(int(side.split()[1]))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(
                    1 + LAST_PLACE * (2 * torch.rand(weight.shape, generator=generator) - 1)
                )
    if side in ("accurate", "bitwise"):
        import eagercache

        eagercache.enable(numerics=side, on_miss="wait", choose="always")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found, losses = {}, []
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        scores = model(images[step % BATCHES])
        loss = nn.functional.cross_entropy(scores, labels[step % BATCHES])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in marks(steps):
            values = torch.cat([weight.detach().flatten() for weight in model.parameters()])
            found[step] = {"values": values.double().tolist(), "losses": losses[-LAST:]}
    hits = 0
    if side in ("accurate", "bitwise"):
        hits = eagercache.stats().hits
    return {"marks": found, "hits": hits}


def distance(mine: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square of the difference, of that of ``other``."""
    squares = sum((a - b) ** 2 for a, b in zip(mine, other, strict=True))
    return math.sqrt(squares / sum(b * b for b in other))


def table(runs: Mapping[str, Any], steps: int) -> list[str]:
    """The lines of the table: a row for each run."""
    first = runs["eager"]["marks"]
    columns = ["run", *(f"after {mark}" for mark in marks(steps)), "last losses", "hits"]
    rows = []
    for side in SIDES:
        found = runs[side]["marks"]
        cells = [
            f"{distance(found[str(mark)]['values'], first[str(mark)]['values']):.1e}"
            for mark in marks(steps)
        ]
        last = str(marks(steps)[-1])
        loss = distance(found[last]["losses"], first[last]["losses"])
        rows.append([side, *cells, f"{loss:.1e}", str(runs[side]["hits"])])
    return frame.markdown(columns, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument("--side", help="one run, in this process; prints JSON")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(train(options.side, options.steps)))
        return
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="drift-") as folder:
        for side in ("eager", *SIDES):
            words = ["--side", side, "--steps", str(options.steps)]
            settings = {"EAGERCACHE_DIR": str(Path(folder, side.split()[0]))}
            settings["EAGERCACHE_LINGER"] = "0"
            Path(settings["EAGERCACHE_DIR"]).mkdir(mode=0o700, exist_ok=True)
            runs[side] = frame.in_process(__file__, *words, **settings)
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    text = "\n".join(
        [f"# {TITLE}", "", f"`python -m bench.modules.drift --steps {options.steps}`. {where}.", ""]
    )
    frame.write("\n".join([text, *table(runs, options.steps), ""]), options.output)


if __name__ == "__main__":
    main()
