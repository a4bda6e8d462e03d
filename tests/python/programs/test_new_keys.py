"""A program that keeps meeting new calls compiles a bounded number of kernels."""

from __future__ import annotations

import pytest
from conftest import Program

# A small T5 and prompts of twenty lengths: every token makes a key longer.
GENERATE = """
import torch, transformers, eagercache
torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.T5Config(
    vocab_size=1000, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
    decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
model = transformers.T5ForConditionalGeneration(config).eval()

def generate(length):
    ids = torch.randint(3, 999, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=20, do_sample=False).tolist()

lengths = range(5, 25)
expected = [generate(length) for length in lengths]
eagercache.enable({more})
same = [generate(length) for length in lengths] == expected
eagercache.wait(300)
same = same and [generate(length) for length in lengths] == expected
stats = eagercache.stats()
report(same=same, compiles=stats.compiles, failures=stats.failures, hits=stats.hits,
       kernels=[[k.op, k.facts.get("form"), k.decision] for k in eagercache.kernels()])
"""


@pytest.mark.long
@pytest.mark.parametrize("more", ["", 'modules="auto"'], ids=["operators", "modules"])
def test_a_language_model_with_prompts_of_many_lengths(program: Program, more: str) -> None:
    seen = program(GENERATE.replace("{more}", more), fills=True, timeout=500)
    assert seen["same"]
    assert 0 < seen["compiles"] <= 60, seen["kernels"]
    assert seen["failures"] == 0, seen["kernels"]
    assert seen["hits"] > 1000
