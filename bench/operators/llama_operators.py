"""A Llama whose norms, rotary embeddings and gates are operators of one kernel each, on one GPU.

    python -m bench.operators.llama_operators [--models llama_prefill,llama_decode] [--pairs 16]
        [--no-compile] [--json FILE]

The models are those of bench/modules/models.py, the operators those of
examples/llama_with_operators.py.
Sides take turns in one process, with kernels that are all there:

operators  the three functions are operators, and nothing else is accelerated
both       the same under eagercache.enable()
compile    torch.compile of the model as it is

"differs" is the largest difference of the logits from eager's, by eager's largest. A figure is the
median of the blocks' means; a ratio that of neighbouring blocks, eager's time by the side's, with
its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.modules.models import Step, block_ms, make, steps_in_block
from bench.shared import frame

sys.path.append(str(frame.ROOT / "examples"))  # compile workers find them there too


def by_turns(eager: Step, other: Step, switch: Any, pairs: int) -> dict[str, float]:
    """Of blocks by turns; ``switch`` is the context that the other side runs in."""
    steps = steps_in_block(eager)
    natives, times = [], []
    for _ in range(pairs):
        natives.append(block_ms(eager, steps))
        with switch():
            times.append(block_ms(other, steps))
    ratios = [native / time for native, time in zip(natives, times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "eager_ms": statistics.median(natives),
        "ms": statistics.median(times),
        "ratio": middle,
        "low": low,
        "high": high,
    }


def measure(name: str, pairs: int, *, compiles: bool) -> dict[str, Any]:
    """All sides of one model."""
    import eagercache
    import torch
    from eagercache.base.load import core
    from llama_with_operators import as_operators

    assert core is not None
    model, step_of = make(name)
    eager = step_of(model)
    expected = eager().double()
    result: dict[str, Any] = {}

    @contextlib.contextmanager
    def answering() -> Any:
        core.set_answering(True)
        with as_operators():
            yield
        core.set_answering(False)

    for side, operators in (("operators", ()), ("both", None)):
        eagercache.enable(operators)
        with answering():
            for _ in range(60):
                eager()
                eagercache.wait(30)
            before = eagercache.stats().hits
            differs = (eager().double() - expected).abs().max() / expected.abs().max()
            hits = eagercache.stats().hits - before
        result[side] = {"hits": hits, "differs": float(differs)}
        result[side].update(by_turns(eager, eager, answering, pairs))
        result[side]["refused"] = sorted(
            {f"{k.op}: {k.reason}" for k in eagercache.kernels() if k.decision != "kernel"}
        )
        eagercache.disable()
    if compiles:
        compiled = step_of(torch.compile(model))
        for _ in range(3):
            compiled()
        result["compile"] = by_turns(eager, compiled, contextlib.nullcontext, pairs)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="llama_prefill,llama_decode")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EAGERCACHE_DIR"] = str(Path(folder) / "store")
        (Path(folder) / "store").mkdir(mode=0o700)
        for name in options.models.split(","):
            results[name] = one = measure(name, options.pairs, compiles=options.compile)
            print(name)
            for side in ("operators", "both", "compile"):
                row = one.get(side)
                if row is None:
                    continue
                text = f"  {side:10} {row['ms']:.2f} ms, eager {row['eager_ms']:.2f}, "
                text += f"x{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
                if "hits" in row:
                    text += f", {row['hits']} hits a step, differs {row['differs']:.1e}"
                print(text, flush=True)
                for reason in row.get("refused", ()):
                    print(f"      {reason[:150]}")
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
