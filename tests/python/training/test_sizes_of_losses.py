"""Losses of texts of many lengths: labels that are the input itself, autocast, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

PROGRAM = """
import contextlib, copy, torch, eagercache
from eagercache.modules.manager import manager
from torch import nn
from torch.nn import functional as F

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.mix, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 50)
        self.drop = nn.Dropout(0.1)
    def forward(self, keep, words, labels):
        rows, length = keep.shape  # an index's sizes may be those of what is none
        x = self.words(words.view(rows, length)) * keep.unsqueeze(-1)
        mixed = self.mix(x).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*mixed, is_causal=True)
        x = self.norm(x + self.drop(self.out(seen.transpose(1, 2).reshape(rows, length, 16))))
        logits = self.head(F.gelu(x))
        following = labels[:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), following), logits

def step(module, forward, words, labels, casts, seed):
    module.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        answers = forward((words != 1).long(), words, labels)
    if not module.training:
        return answers
    answers[0].backward()
    return [*answers, *(p.grad for p in module.parameters())]

def same(module, other, words, labels, casts, seed):
    grading = torch.set_grad_enabled(module.training)
    with grading:
        mine = step(module, module, words, labels, casts, seed)
        own = step(other, other.forward, words, labels, casts, seed)
    off = 0.03 if casts else 5e-6
    return all(a.dtype == b.dtype and a.stride() == b.stride() and bool(
        (a.float() - b.float()).abs().max() <= off * max(1.0, float(b.float().abs().max())))
        for a, b in zip(mine, own, strict=True))

SIZES = [(3, 5), (3, 5), (4, 7), (2, 9), (2, 3), (16, 33), (5, 64), (3, 5), (2, 100)]

def run(training, casts, once):
    torch.manual_seed(0)
    module = Language().train(training)
    other, rows = copy.deepcopy(module), []
    before = eagercache.stats().compiles
    options = dict(modules=[Language], training=True, choose="always", on_miss="wait")
    with eagercache.enable((), **options):
        for seed, sizes in enumerate(SIZES):
            words = torch.randint(0, 50, sizes)
            labels = words if once else words.clone()
            rows.append(same(module, other, words, labels, casts, seed))
        if not once:
            words = torch.randint(0, 50, (3, 8))
            labels = words.clone()
            labels[0, 4:] = -100  # left out of the loss
            rows.append(same(module, other, words, labels, casts, 1))
        try:
            words = torch.full_like(words, 77)
            module(torch.ones_like(words), words, words if once else words.clone())
            raised = False
        except IndexError:
            raised = True
        (row,) = [row for part, row in manager.stats() if part is module]
    hits = row.training_hits if training else row.hits
    return [rows, hits, eagercache.stats().compiles - before, raised]

report(seen=run(*FORM))
"""


@pytest.mark.parametrize(
    ("form", "calls"),
    [("True, True, True", 7), ("False, True, False", 8)],
    ids=["trained on its own words", "evaluated"],
)
def test_losses_of_all_lengths_have_two_kernels(form: str, calls: int, tmp_path: Path) -> None:
    made: dict[str, Any] = run_program(f"FORM = {form}\n" + PROGRAM, tmp_path)
    rows, hits, compiles, raised = made["seen"]
    assert all(rows), made
    assert hits >= calls and compiles <= 2, made
    assert raised, made
