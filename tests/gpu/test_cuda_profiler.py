"""What torch.profiler shows of kernels on a real GPU: launches below their operator or module."""

from __future__ import annotations

import json
from pathlib import Path

import eagercache
import pytest
import torch
from eagercache.modules.manager import manager
from test_cuda_replay import UNTIL_REPLAYED, Deep, rows
from torch import nn
from torch.profiler import ProfilerActivity, profile


def test_what_a_kernel_launches_stands_below_its_operator(tmp_path: Path) -> None:
    x = torch.randn(64, 1024, device="cuda")
    with eagercache.enable(
        ["var.correction"],
        on_miss="wait",
        choose="always",
        devices=["cuda"],
        cache_dir=tmp_path / "cache",
    ):
        for _ in range(3):
            torch.var(x, -1)
        before = eagercache.stats().hits
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            torch.var(x, -1)
            torch.cuda.synchronize()
        assert eagercache.stats().hits == before + 1
    (ours,) = [event for event in found.events() if event.name.startswith("eagercache ")]
    assert ours.cpu_parent.name == "aten::var"
    assert ours.kernels and ours.device_time_total > 0
    row = next(row for row in found.key_averages() if row.key == "aten::var")
    assert row.device_time_total > 0 and row.self_device_time_total == 0


class _Model(nn.Module):
    """A model with a part that has a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Deep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")  # what an effect is: this module has no kernel, its part has
        return self.body(x)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_module_and_its_replayed_graph_keep_their_names(replayed: bool, tmp_path: Path) -> None:
    model = _Model().cuda().eval()
    x = rows()
    with (
        torch.no_grad(),
        eagercache.enable(
            (), modules=Deep, on_miss="wait", choose="always", cache_dir=tmp_path / "cache"
        ),
    ):
        for _ in range(UNTIL_REPLAYED if replayed else 3):
            model(x)
            torch.cuda.synchronize()
        before = [(row.hits, row.replayed) for part, row in manager.stats() if part is model.body]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            model(x)
            torch.cuda.synchronize()
        after = [(row.hits, row.replayed) for part, row in manager.stats() if part is model.body]
    assert sum(row[0] for row in after) == sum(row[0] for row in before) + 1
    assert sum(row[1] for row in after) == sum(row[1] for row in before) + replayed
    (ours,) = [event for event in found.events() if "eagercache" in event.name]
    assert ours.name.startswith("module: body [eagercache ")
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in trace if event.get("cat") == "kernel"]
    # At least one of each layer, by the names that their source has, whoever launches them.
    assert len(kernels) >= 24
    assert sum("triton" in event["name"] for event in kernels) >= 24
    assert ours.device_time_total > 0
