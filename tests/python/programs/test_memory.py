"""What a long program's memory does: it stays what it is."""

from __future__ import annotations

import pytest
from conftest import Program

pytestmark = pytest.mark.once

RESIDENT = """
import gc, resource
def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
"""


def test_a_million_hits_take_no_memory(program: Program) -> None:
    result = program(
        RESIDENT
        + """
import eagercache, torch
torch.set_num_threads(1)  # a call of two threads is, for the most part, their meeting
x = torch.randn(8, 12)
eagercache.enable(["relu"], on_miss="wait", choose="always")
torch.relu(x)
def hits(times):
    for _ in range(times):
        torch.relu(x)
with torch.inference_mode():
    hits(20_000)
    before, begin = eagercache.stats().hits, resident()
    hits(1_000_000)
    report(hits=eagercache.stats().hits - before, growth=resident() - begin)
""",
        fills=True,
    )
    assert result["hits"] == 1_000_000
    assert result["growth"] <= 1 << 20


def test_after_ten_thousand_keys_more_of_them_take_no_more_memory(warm_program: Program) -> None:
    # Keys that nobody compiles: what is bounded is what a process remembers of them.
    result = warm_program(
        RESIDENT
        + """
y = torch.randn(200 * 250)
def keys(first, last):
    for rows in range(1, 201):
        for columns in range(first, last + 1):
            torch.relu(y[: rows * columns].view(rows, columns))
with torch.inference_mode():
    keys(1, 50)
    begin = resident()
    keys(51, 250)
    growth = resident() - begin  # without what a table of all keys takes, for people
    s = eagercache.stats().operators["aten::relu"]
    report(calls=s.native + s.misses + s.pending, growth=growth)
"""
    )
    assert result["calls"] >= 50_000 - 1  # one is a kernel's
    assert result["growth"] <= 1 << 20
