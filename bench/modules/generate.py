"""A language model's `generate()`, unchanged, with kernels of whole modules beside eager.

    python -m bench.modules.generate [--model llama] [--device cpu] [--threads 2] [--tokens 64]
                                       [--turns 5] [--compile] [--output bench/results/x.md]

A model of transformers with random weights, batch 1, its own growing cache: ``llama`` has four
layers of hidden size 256 in float32, ``qwen2`` the shape of Qwen2-0.5B in bfloat16.
Kernels are made first, from an empty store; then eager and kernels take turns in one process, and
with ``--compile`` so does a copy whose forward is ``torch.compile``d. A second process over the
same store says whether anything is compiled again. Milliseconds a token, of all of `generate()`.
Says how many tokens are eager's before the first that is another: in bfloat16 with random weights
the two largest logits are often neighbours, which rounding decides. Ends with 1 where a token
differs in float32, or the second process compiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shared import frame

LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}
QWEN2: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
MODELS = ("llama", "qwen2")
PROMPT = 8


def make_model(name: str, device: str) -> Any:
    """The model, in eval mode."""
    import torch
    import transformers

    torch.manual_seed(0)
    model: Any
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**QWEN2)).bfloat16()
    return model.to(device).eval()


def generator(model: Any, tokens: int) -> Callable[[], list[int]]:
    """A call of `generate()`, which gives its tokens: on the host, so that a GPU is waited for."""
    import torch

    ids = torch.randint(3, 999, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)

    def generate() -> list[int]:
        with torch.no_grad():
            made = model.generate(
                ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        found: list[int] = made[0].tolist()
        return found

    return generate


def milliseconds(generate: Callable[[], list[int]], tokens: int) -> float:
    """Of one token."""
    begin = time.perf_counter()
    generate()
    return (time.perf_counter() - begin) / tokens * 1e3


def equal_tokens(found: list[int], expected: list[int]) -> int:
    """Of the generated ones, those before the first that differs."""
    pairs = list(zip(found, expected, strict=True))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs)) - PROMPT


def settle(generate: Callable[[], list[int]], seconds: float) -> None:
    """Generates until a whole turn was answered without another compile, or time is over."""
    import eagercache
    from eagercache.modules.manager import manager

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = eagercache.stats().compiles
        generate()
        manager.wait(seconds)
        generate()
        manager.wait(seconds)
        if eagercache.stats().compiles == before:
            return


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All sides, in this process."""
    import eagercache
    import torch
    from eagercache.modules.manager import explain_module

    torch.set_num_threads(options.threads)
    model = make_model(options.model, options.device)
    generate = generator(model, options.tokens)
    expected = generate()
    sides: dict[str, list[float]] = {"eager": [], "kernels": []}
    compiled = None
    if options.compile:
        other = copy.deepcopy(model)
        other.forward = torch.compile(other.forward)
        compiled = generator(other, options.tokens)
        compiled()
        compiled()
        sides["torch.compile"] = []
    alike = options.tokens
    for _ in range(options.turns):
        sides["eager"].append(milliseconds(generate, options.tokens))
        if compiled is not None:
            sides["torch.compile"].append(milliseconds(compiled, options.tokens))
        with eagercache.enable((), modules=type(model)):
            settle(generate, options.seconds)
            alike = min(alike, equal_tokens(generate(), expected))
            sides["kernels"].append(milliseconds(generate, options.tokens))
            lines = explain_module(model)[:1]
    return {
        "sides": sides,
        "alike": alike,
        "compiles": eagercache.stats().compiles,
        "explanation": str(lines[0]) if lines else "",
    }


def table(results: list[dict[str, Any]]) -> list[str]:
    """A row for each side of each process."""
    rows = []
    for number, result in enumerate(results, 1):
        eager = statistics.median(result["sides"]["eager"])
        for side, values in result["sides"].items():
            middle = statistics.median(values)
            row = (middle, min(values), max(values))
            rows.append([str(number), side, *(f"{v:.2f}" for v in row), f"x{eager / middle:.2f}"])
    return frame.markdown(["process", "side", "ms a token", "least", "most", "eager's / its"], rows)


def main() -> int:
    """Measures both processes and prints a table; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="for kernels, each turn")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "measure":
        print(json.dumps(measure(options)))
        return 0
    with tempfile.TemporaryDirectory() as store:
        arguments = ["--role", "measure", *sys.argv[1:]]
        results = [frame.in_process(__file__, *arguments, EAGERCACHE_DIR=store) for _ in range(2)]
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    lines = [f"{options.model}, {options.device}; {where}", "", *table(results), ""]
    lines += [
        f"Process {number}: {result['alike']} of {options.tokens} tokens are eager's before one is "
        f"not; {result['compiles']} compiles; {result['explanation']}"
        for number, result in enumerate(results, 1)
    ]
    frame.write("\n".join(lines), options.output)
    exact = options.model == "llama"
    differs = exact and any(row["alike"] < options.tokens for row in results)
    return int(differs or results[1]["compiles"] > 0)


if __name__ == "__main__":
    sys.exit(main())
