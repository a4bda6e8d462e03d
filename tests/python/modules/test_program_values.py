"""What a program set in imported modules and classes is there when its kernels are made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import program_state
import pytest
import torch
from conftest import run_program
from eagercache.callables.module_transfer import pack, unpacked
from eagercache.callables.program_values import collect

HERE = str(Path(__file__).parents[1] / "zoos")

PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, program_state
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
x = torch.linspace(-1, 1, 32).view(4, 8)
rows = {{}}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for name, make in program_state.MADE.items():
        program_state.configure({scale})
        model = make()
        expected = model(x).clone()
        right = all(torch.equal(model(x), expected) for _ in range(4))
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        rows[name] = [right, hits, str(explain_module(model)[:1])]
report(rows=rows)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "cache"
    path.mkdir(mode=0o700)
    return path


# The third program meets the kernels of the first.
@pytest.mark.parametrize("scale", [2.0, 5.0, 2.0])
def test_a_forward_that_reads_what_the_program_set_has_a_kernel(store: Path, scale: float) -> None:
    program = PROGRAM.format(here=HERE, scale=scale)
    rows = run_program(program, store, timeout=300, fills=True)["rows"]
    assert all(row[0] for row in rows.values()), rows
    for name in ("Registered", "Restores", "Configured", "Comprehends"):
        assert rows[name][1] > 0, rows[name]
    assert rows["Leaves"][1] == 0 and "outlives the call" in rows["Leaves"][2], rows["Leaves"]


def test_values_are_the_programs_within_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_state, "gain", 4.0)
    monkeypatch.setattr(program_state, "OPTIONS", SimpleNamespace(scale=4.0))
    monkeypatch.setattr(program_state, "FACTORS", [1.0, 2.0])
    monkeypatch.setattr(program_state.Registered, "cached", 7.0)
    sent = pack(program_state.Configured(), (torch.ones(2),), {})
    made = pack(program_state.Registered(), (torch.ones(2),), {})

    options, factors = SimpleNamespace(scale=1.0), [0.5]
    monkeypatch.setattr(program_state, "gain", None)
    monkeypatch.setattr(program_state, "OPTIONS", options)
    monkeypatch.setattr(program_state, "FACTORS", factors)
    monkeypatch.delattr(program_state.Registered, "cached")
    monkeypatch.setattr(program_state, "REGISTRY", program_state.Registry())
    with unpacked(sent):
        assert program_state.gain == 4.0
        assert program_state.OPTIONS is options and options.scale == 4.0
        assert program_state.FACTORS is factors and factors == [1.0, 2.0]
    assert program_state.gain is None and options.scale == 1.0 and factors == [0.5]
    with unpacked(made):
        assert program_state.Registered.cached == 3.0
        assert dict(program_state.REGISTRY) == {"Registered": {"scale": 2.0}}
    assert "cached" not in vars(program_state.Registered)
    assert not program_state.REGISTRY


def test_what_cannot_be_sent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_state, "FACTORS", [1.0, lambda: 2.0])
    monkeypatch.setattr(program_state, "gain", torch.ones(3))
    monkeypatch.setattr(program_state, "OPTIONS", SimpleNamespace(scale="x" * (2 << 20)))
    names = {value.name for value in collect(program_state.Configured())._values}
    assert names.isdisjoint({"FACTORS", "gain", "OPTIONS"})
