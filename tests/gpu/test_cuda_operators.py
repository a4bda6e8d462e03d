"""Functions as operators (`eagercache.op`) on a real GPU, and warming ahead of time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagercache
import pytest
import torch

PYTHON_TESTS = str(Path(__file__).parent.parent / "python" / "zoos")
sys.path.append(PYTHON_TESTS)

import operator_zoo as zoo  # noqa: E402 - found there by compile workers too

zoo.DEVICE = "cuda"
OPTIONS: dict[str, Any] = {"on_miss": "wait", "choose": "always", "devices": ["cuda"]}


@pytest.fixture(autouse=True)
def operators_enabled() -> Iterator[None]:
    with eagercache.enable((), **OPTIONS):
        yield


def decided() -> dict[str, tuple[str, str]]:
    return {
        kernel.op: (kernel.decision, kernel.reason)
        for kernel in eagercache.kernels()
        if kernel.op.startswith("demo::")
    }


def hits(name: str) -> int:
    row = eagercache.stats().operators.get(f"{name} @CUDA")
    return row.hits if row is not None else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_forward_and_backward_are_kernels_and_equal_the_function(dtype: torch.dtype) -> None:
    exact = {"rtol": 1e-5, "atol": 1e-5}
    half = {"rtol": 3e-2, "atol": 3e-2}
    tolerance = exact if dtype == torch.float32 else half
    for function, args in zoo.calls(dtype, n=24):
        plain = [a.detach() for a in args]
        for _ in range(2):
            function(*plain)
            zoo.gradients(function, args)
        before = hits(function.name), hits(function.name + "_backward")
        pairs = [
            *zip(
                zoo.outputs(function(*plain)), zoo.outputs(function.function(*plain)), strict=True
            ),
            *zip(
                zoo.gradients(function, args), zoo.gradients(function.function, args), strict=True
            ),
        ]
        for mine, expected in pairs:
            assert mine.dtype == expected.dtype and mine.stride() == expected.stride()
            torch.testing.assert_close(mine, expected, **tolerance)
        after = hits(function.name), hits(function.name + "_backward")
        assert after >= (before[0] + 2, before[1] + 1), (function.name, before, after, decided())


def test_an_index_out_of_range_is_reported_as_the_function_reports_it() -> None:
    """In a process of its own: the context does not survive."""
    program = f"""
import sys
sys.path.append({PYTHON_TESTS!r})
import eagercache, operator_zoo as zoo, torch
zoo.DEVICE = "cuda"
eagercache.enable((), on_miss="wait", choose="always", devices=["cuda"])
logits, target = [a.detach() for a in list(zoo.calls())[-1][1]]
for _ in range(3):
    zoo.z_loss(logits, target)
try:
    zoo.z_loss(logits, target + 32)
    torch.cuda.synchronize()
    print("NO ERROR")
except RuntimeError as error:
    print("ERROR", str(error).splitlines()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "device-side assert" in done.stdout, done.stdout + done.stderr


def test_streams_graphs_and_autocast() -> None:
    x, y = zoo.tensors((16, 32), (16, 32), needs=False)
    zoo.swiglu(x, y)
    before = hits("demo::swiglu")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = x.clone().fill_(2.0)
        z = zoo.swiglu(late, y)
    stream.synchronize()
    torch.testing.assert_close(z, zoo.swiglu.function(torch.full_like(x, 2.0), y))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = zoo.swiglu(x, y)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(z, zoo.swiglu.function(x, y))
    assert hits("demo::swiglu") == before + 2
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(zoo.swiglu(x, y), zoo.swiglu.function(x, y))
    assert hits("demo::swiglu") == before + 2


PROGRAM = """
import torch
torch.manual_seed(0)
x = torch.randn(160, 96, device="cuda")
for _ in range(6):
    torch.softmax(x, -1)
    x.sum(-1)
    y = x.to(torch.bfloat16)
    torch.nn.functional.gelu(y)
"""
COUNTED = """
import eagercache, json
s = eagercache.stats()
print("COUNTS", json.dumps([s.hits, s.misses, s.pending, s.native, s.compiles]))
"""


def eagercache_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagercache", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_record_warm_run_compiles_everything_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, trace = tmp_path / "store", tmp_path / "trace"
    store.mkdir(mode=0o700)
    monkeypatch.setenv("EAGERCACHE_DIR", str(store))
    plain, counted = tmp_path / "program.py", tmp_path / "counted.py"
    plain.write_text(PROGRAM)
    counted.write_text(PROGRAM + COUNTED)

    recorded = eagercache_command("record", str(trace), "--", str(plain))
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    warmed = eagercache_command(
        "warm", "--device", "cuda", "--choose", "always", "--json", str(trace)
    )
    assert warmed.returncode == 0, warmed.stdout + warmed.stderr
    entries = json.loads(warmed.stdout)["entries"]
    verdicts = {entry["op"]: (entry["state"], entry["verdict"]) for entry in entries}
    assert len(verdicts) >= 4
    assert set(verdicts.values()) == {("compiled", "kernel")}, entries
    again = eagercache_command(
        "warm", "--device", "cuda", "--choose", "always", "--json", str(trace)
    )
    states = {entry["state"] for entry in json.loads(again.stdout)["entries"]}
    assert (again.returncode, states) == (0, {"found"})

    ran = eagercache_command("run", "--on-miss", "native", "--choose", "always", str(counted))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    row = next(line for line in ran.stdout.splitlines() if line.startswith("COUNTS "))
    hits_seen, misses, pending, _, compiles = json.loads(row[len("COUNTS ") :])
    assert (misses, pending, compiles) == (0, 0, 0), ran.stdout + ran.stderr
    assert hits_seen >= 6 * 4
