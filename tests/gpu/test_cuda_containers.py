"""Operators' kernels as whole containers, which stand in where no launch plan can be made.

Inductor's text is understood for nearly every call, so that the workers of these programs are told
that it is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

_ONLY_CONTAINERS = Path(__file__).parent / "only_containers"

_BEGIN = """
import json, sys
import torch, eagercache
F = torch.nn.functional

def enable():
    eagercache.enable(devices=["cuda"], on_miss="wait", choose="always")

def hits(name):
    row = eagercache.stats().operators.get(name + " @CUDA")
    return row.hits if row is not None else 0

def report(**facts):
    print("REPORT", json.dumps(facts))

enable()
"""


def run(program: str, folder: Path) -> dict[str, Any]:
    environment = dict(os.environ, EAGERCACHE_DIR=str(folder / "store"))
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_ONLY_CONTAINERS), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix("REPORT "))
    return {**facts, "stderr": done.stderr}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("containers")
    (made / "store").mkdir(mode=0o700)
    return made


def test_containers_answer_as_native_and_in_graphs_and_on_side_streams(folder: Path) -> None:
    made = run(
        """
        from eagercache.runtime.session import session

        a, b = torch.randn(64, 384, device="cuda"), torch.randn(64, 384, device="cuda")
        calls = {
            "aten::mul.Tensor": lambda: a * 2.5,
            "aten::_softmax": lambda: torch.softmax(a, -1),
            "aten::native_layer_norm": lambda: torch.native_layer_norm(a, (384,), None, None, 1e-5),
            "aten::cat": lambda: torch.cat([a, b], -1),
        }
        def flat(made):
            return list(made) if isinstance(made, tuple) else [made]
        answered, wrong = {}, []
        for name, call in calls.items():
            call(); call()
            before = hits(name)
            mine = flat(call())
            answered[name] = hits(name) - before
            eagercache.disable()
            native = flat(call())
            enable()
            for x, y in zip(mine, native):
                same = x.dtype == y.dtype and x.stride() == y.stride() and x.device == y.device
                if not same or not torch.allclose(x, y, rtol=1e-5, atol=1e-5):
                    wrong.append(name)
        entries = [e for e in session.store.entries() if e["kind"] == "kernel"]
        forms = {e["facts"]["op"]: e["facts"]["form"] for e in entries}

        x = a.clone()
        written = hits("aten::add_.Tensor")
        x.add_(b); x.add_(b)
        written = hits("aten::add_.Tensor") - written

        graph = torch.cuda.CUDAGraph()
        before = hits("aten::_softmax")
        with torch.cuda.graph(graph):
            y = torch.softmax(a, -1)
        captured = hits("aten::_softmax") - before
        a.copy_(torch.randn_like(a) * 3)
        graph.replay()
        replayed = torch.allclose(y, torch.softmax(a.double(), -1).float(), atol=1e-6)

        big = torch.randn(1 << 20, device="cuda")
        torch.abs(big); torch.abs(big)
        stream = torch.cuda.Stream()
        late = 0
        for _ in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                z = big.clone()
                z.fill_(-3.0)
                z = torch.abs(z)
            stream.synchronize()
            late += not bool((z == 3.0).all())
        other = torch.cuda.device_count() - 1
        moved = torch.abs(big.to(f"cuda:{other}"))
        same = moved.device.index == other and torch.equal(moved.cpu(), big.abs().cpu())
        report(answered=answered, wrong=wrong, forms=forms, written=written, captured=captured,
               replayed=replayed, late=late, same=same)
        """,
        folder,
    )
    assert set(made["answered"].values()) == {1}, made["answered"]
    assert not made["wrong"]
    assert set(made["forms"].values()) == {"container"} and len(made["forms"]) >= 4, made["forms"]
    assert made["written"] == 0  # a container allocates what it returns
    assert made["captured"] == 1 and made["replayed"]
    assert made["late"] == 0 and made["same"]


def test_a_second_process_compiles_nothing(folder: Path) -> None:
    made = run(
        """
        a = torch.randn(64, 384, device="cuda")
        torch.softmax(a, -1)
        torch.softmax(a, -1)
        stats = eagercache.stats()
        report(compiles=stats.compiles, hits=hits("aten::_softmax"))
        """,
        folder,
    )
    assert made["compiles"] == 0 and made["hits"] >= 1


def test_memory_that_runs_out_is_natives_to_report_and_no_fault_of_the_kernel(folder: Path) -> None:
    made = run(
        """
        x = torch.randn(1 << 20, device="cuda")
        torch.abs(x); torch.abs(x)
        full = torch.cuda.memory_reserved() + (1 << 20)
        torch.cuda.set_per_process_memory_fraction(full / torch.cuda.mem_get_info()[1])
        kept, error = [], ""
        try:
            while True:
                kept.append(torch.abs(x))
        except torch.OutOfMemoryError as raised:
            error = type(raised).__name__
        kept.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        before = hits("aten::abs")
        torch.abs(x)
        report(error=error, hits=hits("aten::abs") - before, failures=eagercache.stats().failures)
        """,
        folder,
    )
    assert made["error"] == "OutOfMemoryError"
    assert made["hits"] == 1 and made["failures"] == 0, made


def test_a_broken_context_is_reported_as_native_reports_it(folder: Path) -> None:
    made = run(
        """
        x = torch.randn(1 << 20, device="cuda")
        torch.abs(x); torch.abs(x)
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
        error = ""
        try:
            for _ in range(1000):
                torch.abs(x)
            torch.cuda.synchronize()
        except RuntimeError as raised:
            error = str(raised).splitlines()[0]
        report(error=error, failures=eagercache.stats().failures)
        """,
        folder,
    )
    assert "device-side assert" in made["error"]
    assert made["failures"] == 0 and "reported an error" not in made["stderr"]
