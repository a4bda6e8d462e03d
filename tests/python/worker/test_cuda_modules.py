"""Containers for GPUs, as far as they can be made without one (tests/gpu has the rest)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import clean_environment, run_program
from eagercache.base.load import core
from eagercache.modules import forms
from eagercache.service import cuda_gate
from eagercache.worker.compat import triton_kernels
from eagercache.worker.inductor import compile as compile_module
from eagercache.worker.inductor.commands import CompileFailed
from eagercache.worker.timing import cuda_timing

HERE = str(Path(__file__).parent.parent)

# A driver that loads and fails: what a container asks of it by name is what matters here.
DRIVER = """
#define FAILS(name) int name(void) { return 100; }
FAILS(cuFuncSetAttribute) FAILS(cuGetErrorString) FAILS(cuLaunchKernel)
FAILS(cuModuleGetFunction) FAILS(cuModuleLoadData) FAILS(cuModuleUnload)
"""


@pytest.mark.skipif(
    torch.version.cuda is None or not torch.__version__.startswith("2.11."),
    reason="containers for GPUs are made with torch 2.11 built for CUDA",
)
def test_a_container_is_made_without_a_toolkit_and_asks_only_for_what_torch_brings(
    tmp_path: Path,
) -> None:
    pytest.importorskip("triton", reason="this torch has no Triton")
    made = run_program(
        f"""
        import os, sys
        sys.path.insert(0, {HERE!r})
        for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"):
            os.environ.pop(name, None)
        os.environ["CUDA_HOME"] = "/nowhere"
        import fake_cuda
        report(**fake_cuda.compile_container({str(tmp_path)!r}))
        """,
        None,
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    text = made["text"]
    assert text["num_inputs"] == 8 and text["num_constants"] == 0
    assert len(text["kernels"]) >= 2 and text["extern_calls"] and not text["uses_proxy_executor"]
    assert Path(made["path"]).read_bytes().count(b"\x7fELF") > len(text["kernels"])  # embedded

    call = made["call"]
    assert call["why"] == "generated text not understood: a planted statement"
    assert call["text"]["reduces"] and call["text"]["num_inputs"] == 3
    kernels = call["text"]["kernels"]
    assert len(kernels) >= 1
    assert Path(call["path"]).read_bytes().count(b"\x7fELF") > len(kernels)

    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "driver.c").write_text(DRIVER)
    command = ["g++", "-shared", "-fPIC", "-x", "c", str(driver / "driver.c")]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(driver / "libcuda.so.1")]
    subprocess.run(command, check=True)
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, torch; from eagercache.base.load import core\n"
            "try: core.load_module([sys.argv[1]], 'cuda:0', [], [], [], None)\n"
            "except Exception as error: print(error)",
            made["path"],
        ],
        env=clean_environment(LD_LIBRARY_PATH=str(driver)),
        capture_output=True,
        text=True,
        check=False,
    )
    # It got as far as asking for the GPU, and was told that there is none.
    assert "is insufficient" in loaded.stdout or "could not be made" in loaded.stdout, loaded


@pytest.mark.skipif(
    torch.version.cuda is None or not torch.__version__.startswith("2.11."),
    reason="containers for GPUs are made with torch 2.11 built for CUDA",
)
def test_a_forward_with_attention_calls_what_draws_in_eagers_order(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="this torch has no Triton")
    made = run_program(
        f"""
        import sys
        sys.path.insert(0, {HERE!r})
        import fake_cuda
        report(**fake_cuda.write_drawing_attention({str(tmp_path)!r}))
        """,
        None,
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    assert made["draws"] == ["Noise", "Attention", "Noise"] * 2
    once = ["native_dropout", "_scaled_dot_product_cudnn_attention", "native_dropout"]
    assert made["calls"] == once * 2


def test_entries_are_for_all_gpus_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(last: int) -> bytes:
        return bytes(16) + last.to_bytes(8, "little")

    kinds = {0: "sm_90 132 multiprocessors", 1: "sm_90 132 multiprocessors", 2: "sm_80 108"}
    monkeypatch.setattr(
        forms, "core", SimpleNamespace(cuda_architecture=lambda index: kinds[index])
    )
    digests = [forms.entry_digest("i", key(word), "faster") for word in range(4)]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3


class _Calls:
    """A forward and a kernel with made-up times, and a clock and a GPU that believe them."""

    def __init__(self, host: tuple[float, float], device: tuple[float, float]) -> None:
        self.host, self.device = host, device
        self.now = 0.0  # of the host
        self.busy = 0.0  # until when the GPU is

    def run(self, by_kernel: bool, calls: int) -> None:
        for _ in range(calls):
            self.now += self.host[by_kernel]
            self.busy = max(self.busy, self.now) + self.device[by_kernel]

    def wait(self) -> None:
        self.now = max(self.now, self.busy)

    def sleep(self, cycles: int) -> None:
        self.busy = max(self.now, self.busy) + cycles / 2.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(cuda_timing.time, "perf_counter_ns", lambda: self.now)


class _Event:
    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._time = 0.0

    def record(self) -> None:
        self._time = max(self._calls.now, self._calls.busy)

    def synchronize(self) -> None:
        self._calls.wait()

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) / 1e6


@pytest.mark.parametrize(
    ("host", "device", "verdict"),
    [
        ((1.7e6, 0.6e6), (0.45e6, 0.35e6), True),  # a decode: the host is what is waited for
        ((1.7e6, 0.6e6), (3.0e6, 2.1e6), True),  # a prefill: the GPU is
        ((1.7e6, 0.6e6), (3.0e6, 3.6e6), False),
        ((1.7e6, 2.0e6), (0.45e6, 0.35e6), False),
        ((5e4, 5e4), (2e4, 2e4), False),
    ],
)
def test_either_time_decides_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    host: tuple[float, float],
    device: tuple[float, float],
    verdict: bool,
) -> None:
    calls = _Calls(host, device)
    calls.install(monkeypatch)
    timing = cuda_timing.time_sides(calls.run)
    assert timing.native_host_ns == pytest.approx(host[0], rel=0.01)
    assert timing.kernel_host_ns == pytest.approx(host[1], rel=0.01)
    assert timing.native_device_ns == pytest.approx(device[0], rel=0.01)
    assert timing.kernel_device_ns == pytest.approx(device[1], rel=0.01)
    assert cuda_timing.decide_cuda(timing, 0.03)[0] is verdict


@pytest.mark.parametrize(
    ("host", "device", "verdict"),
    [
        ((6e3, 4e3), (2e3, 2e3), True),  # (native, kernel): its host gains, which is waited for
        ((6e3, 5.9e3), (2e3, 1e3), True),  # the device gains, the host does not lose
        ((6e3, 6.2e3), (2e3, 1e3), False),  # the host loses a little in a call that waits for it
        ((6e3, 4e3), (2e3, 2.2e3), False),  # the device loses
        ((12e3, 16e3), (66e3, 51e3), True),  # the device is waited for, and hides the host
    ],
)
def test_a_call_that_waits_for_its_host_never_loses_host_time(
    host: tuple[float, float], device: tuple[float, float], verdict: bool
) -> None:
    timing = cuda_timing._judge([device] * 25, [host] * 25, 1)
    assert cuda_timing.decide_cuda(timing, 0.03)[0] is verdict


def test_an_operator_is_timed_until_enough_pairs_are_quiet() -> None:
    noise = random.Random(0)
    taken = 0

    def measure(quiet_share: float) -> tuple[float, float]:
        nonlocal taken
        taken += 1
        slice_ns = 0.0 if noise.random() < quiet_share else 2e6  # another process's turn
        return 3e4 + slice_ns, 2e4

    def quiet(share: float) -> list[tuple[float, float]]:
        return cuda_timing.until_quiet(lambda _: measure(share), 25)

    assert len(quiet(1.0)) == taken == 25
    taken = 0
    assert len(quiet(0.3)) >= 15 and 25 < taken < 200


def test_a_gpu_that_others_keep_busy_hides_a_small_gain_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = random.Random(0)

    def verdict(kernel: float) -> bool:
        calls = _Calls((1.7e6, kernel), (1.5e6, kernel))
        calls.install(monkeypatch)

        def disturbed(by_kernel: bool, count: int) -> None:
            calls.run(by_kernel, count)
            calls.now += noise.choice([0.0, 0.3e6, 3e6, 6e6])  # of the whole block
            calls.busy = max(calls.busy, calls.now)

        return cuda_timing.decide_cuda(cuda_timing.time_sides(disturbed), 0.03)[0]

    verdicts = [verdict(0.3e6), verdict(1.68e6)]
    assert verdicts == [True, False]


@pytest.mark.parametrize(
    ("free", "mode", "reason"),
    [(140 << 30, 0, ""), (6 << 30, 0, "MiB free"), (140 << 30, 3, "exclusive")],
)
def test_no_worker_for_a_module_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, free: int, mode: int, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 141 << 30))
    fake = SimpleNamespace(cuda_compute_mode=lambda _: mode)
    found = cuda_gate.reason_to_stay_off_module(0, 672 << 20, fake)
    assert reason in found and bool(found) == bool(reason)


def test_captures_are_relaxed_where_there_is_no_driver_too() -> None:
    assert core is not None
    with core.RelaxedCapture():
        pass


def test_where_compilers_of_triton_fail_kernels_are_compiled_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[int] = []

    def fail_beside_others(*arguments: Any, **_: Any) -> str:
        tried.append(arguments[3]["compile_threads"])
        if tried[-1] > 1:
            raise CompileFailed("InductorError: SubprocException: no such kernel", transient=False)
        return "made"

    monkeypatch.setattr(compile_module, "triton_compilers", lambda _: 3)
    monkeypatch.setattr(triton_kernels, "start_triton_compilers", lambda _: None)
    monkeypatch.setattr(compile_module.Tools, "_compile", fail_beside_others)
    tools = object.__new__(compile_module.Tools)
    nothing: Any = None
    assert tools._compile_for_gpu(nothing, (), {}, tmp_path, nothing) == "made"
    assert tried == [3, 1]


def test_products_of_one_row_become_sums_and_stay_what_they_are() -> None:
    """The graph is of a GPU; what it computes is seen on the CPU, in float32 as its sums are."""
    said = run_program(
        f"""
        import sys
        sys.path.insert(0, {HERE!r})
        import fake_cuda, torch
        fake_cuda.install()
        from eagercache.worker.graphs.vector_products import use_vector_products
        from torch import nn
        from torch._subclasses.fake_tensor import FakeTensorMode

        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.gate = nn.Linear(24, 40), nn.Linear(24, 40, bias=False)
                self.down = nn.Linear(40, 24)

            def forward(self, x):
                return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

        def graph_of(rows, dtype):
            torch.set_default_dtype(dtype)
            with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
                module, x = Gated(), torch.empty(*rows, 24)
            torch.set_default_dtype(torch.float32)
            program = torch.export.export(module, (x,), strict=True)
            return torch.fx.GraphModule(program.graph_module, program.graph)

        def linears(graph):
            return sum("linear" in str(node.target) for node in graph.graph.nodes)

        left = {{}}
        for name, rows, dtype in (
            ("one", (1, 1), torch.bfloat16), ("vector", (), torch.float16),
            ("two", (1, 2), torch.bfloat16), ("float", (1, 1), torch.float32),
        ):
            graph = graph_of(rows, dtype)
            use_vector_products(graph.graph)
            graph.graph.lint()
            graph.recompile()
            left[name] = linears(graph)
        plain, changed = graph_of((1, 1), torch.bfloat16), graph_of((1, 1), torch.bfloat16)
        use_vector_products(changed.graph)
        changed.recompile()
        given = [
            torch.randn(node.meta["val"].shape, dtype=torch.bfloat16) / 4
            for node in plain.graph.find_nodes(op="placeholder")
        ]
        expected, (answer,) = plain(*given)[0], changed(*given)
        report(left=left, dtype=str(answer.dtype), shape=list(answer.shape),
               worst=float((answer - expected).abs().max() / expected.abs().max()))
        """,
        None,
    )
    assert said["left"] == {"one": 0, "vector": 0, "two": 3, "float": 3}
    assert said["dtype"] == "torch.bfloat16" and said["shape"] == [1, 1, 24]
    assert said["worst"] < 0.02
