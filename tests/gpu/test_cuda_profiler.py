"""What torch.profiler shows of kernels on a real GPU: launches stand below their operator."""

from __future__ import annotations

from pathlib import Path

import eagercache
import torch
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
