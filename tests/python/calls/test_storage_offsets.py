"""What counts from the start of an argument's storage, of which no key knows where it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_program

PARTS = """
import torch, eagercache
from eagercache.modules import manager

class Rows(torch.nn.Module):
    def forward(self, x):
        return torch.as_strided(x.view(-1), (2, 2), (1, 2), 0).sin() * 2

class Relative(torch.nn.Module):
    def forward(self, x):
        return torch.as_strided(x, (2, 2), (1, 2)).sin() * 2

@eagercache.op("offsets::rows")
def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (2, 2), (1, 2), 0).sin() * 2

def copied(x):
    return torch.as_strided_copy(x, (2, 2), (1, 2), 0)

def scattered(x):
    return torch.as_strided_scatter(x, torch.ones(2), (2,), (1,), 9)

base = torch.arange(40.0) / 10
parts = [Rows().eval(), Relative().eval(), rows, copied, scattered]

def answers():
    calls = [base[start : start + 9].view(3, 3) for start in (0, 4, 8, 0)]
    return [[part(call).tolist() for call in calls] for part in parts]
"""


@pytest.mark.parametrize("first", [0, 4])
def test_views_are_of_the_storage_whatever_was_compiled_first(tmp_path: Path, first: int) -> None:
    tmp_path.chmod(0o700)
    seen = run_program(
        PARTS
        + f"""
with torch.no_grad():
    eager = answers()
    with eagercache.enable("all", modules="auto", on_miss="wait", choose="always"):
        for part in parts:
            for _ in range(3):
                part(base[{first} : {first} + 9].view(3, 3))
        mine = answers()
        hits = [row.hits for _, row in manager.manager.stats()]
report(eager=eager, mine=mine, hits=hits)
""",
        tmp_path,
        timeout=600,
        fills=True,
    )
    assert seen["mine"] == seen["eager"]
    assert sorted(map(bool, seen["hits"])) == [False, True]  # what counts from its argument is met
