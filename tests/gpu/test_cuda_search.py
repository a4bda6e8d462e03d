"""Forms of kernels that are searched, and gradients of norms that are read once, on a real GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
import eagercache, torch

eagercache.enable(on_miss="wait", devices="cuda")
aten = torch.ops.aten
torch.manual_seed(0)
x = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
grad, data = (torch.randn(16384, 4096, device="cuda", dtype=x.dtype) for _ in range(2))
mean, rstd = data.float().mean(1, keepdim=True), data.float().var(1, keepdim=True).rsqrt()
weight = torch.rand(4096, device="cuda", dtype=x.dtype)

def calls():
    softmax = aten._softmax(x, 1, False)
    return [softmax, *aten.native_layer_norm_backward(
        grad, data, [4096], mean, rstd, weight, weight, [True] * 3)]

first, second = calls(), calls()
with torch.device("cpu"):
    wide = torch.softmax(x.double().cpu(), 1)
    d, g, w = data.double().cpu(), grad.double().cpu(), weight.double().cpu()
    m, r = mean.double().cpu(), rstd.double().cpu()
    normed = (d - m) * r
expected = [wide, None, (g * normed).sum(0), g.sum(0)]
errors = [
    float((a.double().cpu() - e).abs().max() / e.abs().max())
    for a, e in zip(second, expected) if e is not None
]
rows = {row.op: row for row in eagercache.kernels()}
print(json.dumps({
    "errors": errors,
    "decisions": {op: row.decision for op, row in rows.items()},
    "facts": {op: {n: row.facts.get(n) for n in ("search", "kernel_form", "bytes", "launch_plan")}
              for op, row in rows.items()},
    "shares": {op: row.share_of_copy for op, row in rows.items()},
    "hits": eagercache.stats().hits,
}))
"""


def run(folder: Path, search: str) -> dict[str, Any]:
    environment = {**os.environ, "EAGERCACHE_DIR": str(folder / "store"), "EAGERCACHE_LINGER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, "EAGERCACHE_SEARCH": search},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


SOFTMAX, NORM = "aten::_softmax", "aten::native_layer_norm_backward"


def test_a_search_finds_a_form_that_answers_right(tmp_path: Path) -> None:
    quick = run(tmp_path, "quick")
    assert quick["decisions"][SOFTMAX] == "kernel"
    assert quick["facts"][SOFTMAX]["search"] == "due"
    deep = run(tmp_path / "deep", "deep")
    facts = deep["facts"][SOFTMAX]
    # Inductor's first form of a row of 8,192 reads it three times.
    assert (facts["search"], facts["kernel_form"]) == ("done", "whole rows")
    assert facts["bytes"] == str(2 * 4096 * 8192 * 2)
    assert deep["shares"][SOFTMAX] > 1.2 * quick["shares"][SOFTMAX]
    for result in (quick, deep):
        assert result["errors"][0] < 5e-3  # half a unit of bfloat16's last place
        assert max(result["errors"][1:]) < 5e-3


def test_the_gradient_of_a_norm_is_read_once(tmp_path: Path) -> None:
    result = run(tmp_path, "off")
    assert result["decisions"][NORM] == "kernel"
    launches = json.loads(result["facts"][NORM]["launch_plan"])["launches"]
    assert "native_layer_norm_backward" in launches[0]["function"]
    assert len(launches) >= 3  # rows and columns at once, then a sum for each of two weights
    assert max(result["errors"]) < 5e-3
