"""Kernels of whole modules for calls under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_program

HERE = str(Path(__file__).parents[1] / "zoos")

AUTOCAST = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, module_zoo
from eagercache.modules.manager import explain_module, manager
from eagercache.runtime.session import session
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = module_zoo.Mixed().eval(), torch.randn(8, 32)
eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
def hits():
    return sum(row.hits for part, row in manager.stats() if part is model)
rows = {{}}
with torch.no_grad():
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            answers = model(x)
        rows["hits"], rows["lines"] = hits(), explain_module(model)
    (entry,) = [row for row in session.store.entries() if row["kind"] == "kernel"]
    eagercache.enable(ops=(), modules="auto", on_miss="native", choose="always")
    with torch.autocast("cpu", torch.bfloat16):
        model(x), model(x)
        rows["again"] = hits()
    with torch.autocast("cpu", torch.float16):
        model(x)
    model(x)
    rows["others"] = hits()
    eagercache.disable()
    with torch.autocast("cpu", torch.bfloat16):
        native = model(x)
report(rows=rows, native_error=float(entry["facts"]["native_error"]),
       dtypes=[[str(a.dtype), str(b.dtype)] for a, b in zip(answers, native)],
       far=[float((a.float() - b.float()).abs().max() / b.float().abs().max())
            for a, b in zip(answers, native)])
"""


def test_a_kernel_for_calls_under_autocast_casts_as_autocast_does(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("autocast") / "cache"
    path.mkdir(mode=0o700)
    seen = run_program(AUTOCAST.format(here=HERE), path, timeout=600, fills=True)
    rows = seen["rows"]
    assert rows["hits"] == 2, rows["lines"]
    assert seen["dtypes"] == [["torch.bfloat16"] * 2, ["torch.float32"] * 2]
    assert seen["far"][0] < 0.03 and seen["far"][1] < 1e-6
    # The forward that it was proved against had the parameters of the moment, not kept casts.
    assert seen["native_error"] < 32
    assert rows["again"] == rows["others"] > 0  # another dtype, or no autocast, is another call
