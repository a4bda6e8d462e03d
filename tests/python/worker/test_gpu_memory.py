"""What workers take of a GPU's memory, with a GPU that is made up."""

from __future__ import annotations

import pytest
import torch
from eagercache.worker.timing import gpu_memory

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


class Gpu:
    """What a worker finds of a GPU: ``free`` bytes, of which the last number stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
        self.free, self.asked, self.emptied = free, 0, 0
        self.limits: list[float] = []
        for name in ("is_available", "is_initialized"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 20 * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._info)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda part, _: self.limits.append(part)
        )
        monkeypatch.setattr(gpu_memory.time, "sleep", lambda _: None)

    def _info(self, _: int = 0) -> tuple[int, int]:
        self.asked += 1
        return self.free.pop(0) if len(self.free) > 1 else self.free[0], 80 * GIB

    def _empty(self) -> None:
        self.emptied += 1


class Step:
    """Fails so often with ``error``."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.made = failures, error, 0

    def __call__(self) -> str:
        self.made += 1
        if self.made <= self.failures:
            raise self.error
        return "proved"


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB.")


def test_a_step_without_room_is_made_again_when_others_gave_theirs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, [10 * GIB, 30 * GIB, 60 * GIB])
    step = Step(1, OUT_OF_MEMORY)
    assert gpu_memory.with_room(step) == "proved"
    assert (step.made, gpu.emptied) == (2, 1)
    assert gpu.asked == 4  # twice too little, then 40 of 60, then for the share
    assert gpu.limits == [pytest.approx(40 / 80)]


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to", "can't allocate memory: you"])
def test_a_kernels_own_allocation_counts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, [80 * GIB])
    assert gpu_memory.with_room(Step(1, RuntimeError(text))) == "proved"


def test_no_room_twice_is_the_requests_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, [80 * GIB])
    step = Step(2, OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError):
        gpu_memory.with_room(step)
    assert step.made == 2


def test_another_failure_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, [80 * GIB])
    step = Step(1, ValueError("off by 3 ulp"))
    with pytest.raises(ValueError):
        gpu_memory.with_room(step)
    assert (step.made, gpu.emptied) == (1, 0)


def test_a_gpu_that_stays_full_is_not_waited_for_beyond_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, [GIB])
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(gpu_memory.time, "monotonic", lambda: next(clock))
    assert gpu_memory.with_room(Step(1, OUT_OF_MEMORY)) == "proved"
    assert gpu.asked < 10
