"""What workers take of a GPU's memory, with a GPU that is made up."""

from __future__ import annotations

import pytest
import torch
from eagercache.worker.jobs import gpu_memory

GIB = 1 << 30


def test_allocations_end_at_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, float] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * GIB)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, index: limits.__setitem__(index, part),
    )
    gpu_memory.take_a_share()
    assert limits == {0: pytest.approx(24 / 80)}


@pytest.mark.parametrize("used", [False, True])
def test_what_is_cached_is_given_back_where_there_is_a_context(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    gpu_memory.give_back()
    assert emptied == [True] * used


def test_a_gpu_that_cannot_be_asked_is_left_to_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("mem_get_info", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, fail)
    gpu_memory.take_a_share()
    gpu_memory.give_back()
