"""How many kernels are compiled for a language model whose calls keep having new sizes.

    python -m bench.compiling.new_keys [--lengths 20] [--tokens 20] [--device cpu] [--output FILE]

T5 generates after prompts of that many lengths, one after the other; each token makes the keys of
attention longer, so that next to no call has the sizes of the one before. That is done natively,
and then pass after pass with kernels, of operators alone and of whole modules too, each over an
empty store, until a pass asks for nothing new. The status is 1 where more than --most kernels were
compiled, an answer is another one, or a kernel failed. What counts is how many, not how fast.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.shared import frame

SIDES = {"operators": {}, "operators and modules": {"modules": "auto"}}
SIZES = {
    "small": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
}
COLUMNS = (
    "kernels of", "passes", "calls", "by kernels", "kinds of calls met", "compiled", "failed",
    "kernels by form", "decided for native", "answers alike",
)  # fmt: skip


def generate(model: Any, length: int, tokens: int, device: str) -> list[int]:
    """What the model says after a prompt of this length."""
    import torch

    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 999, (1, length), generator=generator).to(device)
    with torch.no_grad():
        said: list[int] = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0].tolist()
    return said


def child(options: argparse.Namespace) -> dict[str, Any]:
    """All passes of one side, in this process."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=1000, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
        **SIZES[options.size],
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval().to(options.device)
    lengths = range(5, 5 + options.lengths)
    expected = [generate(model, n, options.tokens, options.device) for n in lengths]
    import eagercache

    eagercache.enable(**SIDES[options.child])
    same, passes, compiles = True, 0, -1
    while passes < options.passes and (stats := eagercache.stats()).compiles != compiles:
        compiles = stats.compiles
        found = [generate(model, n, options.tokens, options.device) for n in lengths]
        same, passes = same and found == expected, passes + 1
        eagercache.wait(options.wait)
    stats = eagercache.stats()
    kernels = eagercache.kernels()
    forms = Counter(k.facts.get("form") or "plain" for k in kernels if k.decision == "kernel")
    native = stats.misses + stats.pending + stats.native + stats.aside
    return {
        "same": same,
        "passes": passes,
        "calls": stats.hits + native,
        "hits": stats.hits,
        "module_hits": stats.module_hits,
        "misses": stats.misses,
        "compiles": stats.compiles,
        "failures": stats.failures,
        "failed": [k.reason for k in kernels if k.decision == "failed"],
        "outstanding": stats.outstanding,
        "forms": dict(forms),
        "native": sum(k.decision == "native" for k in kernels),
    }


def cells(side: str, found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    hits = f"{found['hits']:,}"
    if found["module_hits"]:
        hits += f", and {found['module_hits']:,} of modules"
    forms = ", ".join(f"{count} {form}" for form, count in sorted(found["forms"].items()))
    counts = (f"{found[name]:,}" for name in ("misses", "compiles", "failures"))
    said = "yes" if found["same"] else "no"
    return [
        side, str(found["passes"]), f"{found['calls']:,}", hits, *counts, forms or "none",
        str(found["native"]), said,
    ]  # fmt: skip


def main() -> int:
    """A process for each side; 1 where a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, default=20, help="of prompts")
    parser.add_argument("--tokens", type=int, default=20, help="after each")
    parser.add_argument("--passes", type=int, default=4, help="at most, over all lengths")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds for kernels, each pass")
    parser.add_argument("--most", type=int, default=60, help="kernels that may be compiled")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="where the table is written")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return 0
    rows, past = [], False
    for side in SIDES:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = frame.in_process(
                __file__, *sys.argv[1:], "--child", side, EAGERCACHE_DIR=folder
            )
        rows.append(cells(side, found))
        past |= found["compiles"] > options.most or not found["same"] or found["failures"] > 0
        past |= found["outstanding"] > 0
        for reason in found["failed"]:
            print(f"{side}: failed: {reason}", file=sys.stderr)
    machine = frame.machine()
    where = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        f"# Kernels that are compiled for calls with ever new sizes, {options.device.upper()}, "
        f"{machine['date']}",
        "",
        f"`bench/compiling/new_keys.py --size {options.size} --device {options.device}`: T5, "
        f"prompts of {options.lengths} lengths, {options.tokens} tokens after each.",
        f"At most {options.most} may be compiled. {where}",
        "",
        *frame.markdown(COLUMNS, rows),
        "",
    ]
    frame.write("\n".join(lines), options.output)
    return int(past)


if __name__ == "__main__":
    sys.exit(main())
