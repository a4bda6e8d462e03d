"""Programs that change their module between its calls, beside the same without kernels.

    python -m bench.modules.changing [--rounds 20] [--calls 40] [--output FILE]

A small language model (Llama, four layers, one thread, CPU), called again and again; what happens
between the calls is the row:

nothing          the module stays what it is
modes            evaluation and a training step by turns
frozen layer     a layer's parameters need gradients, and do not, by turns
hook             every second call has a forward hook on a layer
attribute        an attribute that the forward reads has two values by turns
part             two MLPs by turns in a layer
parameter        a new parameter in an old one's place before each call
functional_call  every second call with other tensors, by torch.func.functional_call

Blocks of calls by turns in one process, kernels switched off in every second one. The first rounds
are in the figures, where looks at the module have their free ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shared import frame

TITLE = "Programs that change their module between its calls"
KINDS = (
    *("nothing", "modes", "frozen layer", "hook"),
    *("attribute", "part", "parameter", "functional_call"),
)
WARM = 16


def program() -> tuple[Any, Callable[[str, int], None]]:
    """A model, and one call of it in a program of that kind, by the call's number."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 256, (2, 16))
    others = {name: one.detach().clone() for name, one in model.named_parameters()}
    layer: Any = model.model.layers[0]
    parts = (layer.mlp, copy.deepcopy(layer.mlp))

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)

    def train() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    def step(kind: str, number: int) -> None:
        odd = bool(number % 2)
        if kind == "modes":
            model.train(odd)
            train() if odd else forward()
        elif kind == "frozen layer":
            layer.requires_grad_(odd)
            train()
        elif kind == "hook" and odd:
            handle = layer.register_forward_hook(lambda *_: None)
            forward()
            handle.remove()
        elif kind == "functional_call" and odd:
            with torch.no_grad():
                given = {"input_ids": tokens, "use_cache": False}
                torch.func.functional_call(model, others, (), given)
        else:
            if kind == "attribute":
                layer.input_layernorm.variance_epsilon = 1e-5 if odd else 1e-6
            elif kind == "part":
                layer.mlp = parts[number % 2]
            elif kind == "parameter":
                norm: Any = model.model.norm
                norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
            forward()

    return model, step


def measure(kind: str, rounds: int, calls: int) -> list[str]:
    """A row of the table."""
    import eagercache
    import torch
    from eagercache.base.load import core
    from eagercache.modules.manager import manager

    assert core is not None
    torch.set_num_threads(1)
    model, step = program()
    options: dict[str, Any] = {"ops": (), "modules": "auto", "training": True, "choose": "always"}
    eagercache.enable(on_miss="wait", **options)
    for number in range(WARM):
        step(kind, number)
    eagercache.enable(**options)
    count = 0

    def block() -> float:
        nonlocal count
        begin = time.perf_counter()
        for _ in range(calls):
            step(kind, count)
            count += 1
        return (time.perf_counter() - begin) / calls * 1e3

    with_kernels, without = [], []
    for _ in range(rounds):
        with_kernels.append(block())
        core.set_answering(False)
        without.append(block())
        core.set_answering(True)
    hits = sum(row.hits for part, row in manager.stats() if part is model)
    ratios = [one / other for one, other in zip(with_kernels, without, strict=True)]
    low, median, high = frame.quartiles(ratios)
    return [
        kind,
        f"{statistics.median(without):.2f}",
        f"{statistics.median(with_kernels):.2f}",
        f"{median:.2f} ({low:.2f} to {high:.2f})",
        f"{ratios[0]:.2f}",
        f"{sum(with_kernels) / sum(without):.2f}",
        f"{hits / (rounds * calls):.0%}",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument("--kind", choices=KINDS, help="one row, in this process; prints JSON")
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.kind, options.rounds, options.calls)))
        return
    words = ["--rounds", str(options.rounds), "--calls", str(options.calls)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="changing-") as folder:
        settings = {"EAGERCACHE_DIR": folder, "EAGERCACHE_LINGER": "0"}
        for kind in KINDS:
            rows.append(frame.in_process(__file__, "--kind", kind, *words, **settings))
    columns = ["between the calls", "eager, ms", "with kernels, ms", "ratio (quartiles)",
               "first round", "all together", "by kernel"]  # fmt: skip
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    asked = f"`python -m bench.modules.changing {' '.join(words)}`. {where}."
    text = "\n".join([f"# {TITLE}", "", asked, "", *frame.markdown(columns, rows), ""])
    frame.write(text, options.output)


if __name__ == "__main__":
    main()
