"""Requests for GPUs that were open when their program ended: who goes on with them, and when not.

The driver's library is played here; tests/gpu/test_cuda_lingering.py asks the real one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagercache.cli import warm_pending
from eagercache.runtime import compile_requests
from eagercache.runtime.session import session
from eagercache.service import idle_gpu, linger_main
from eagercache.service.gpu_watch import Use, use_of
from eagercache.service.idle_gpu import IdleGpu
from eagercache.service.pending import PendingFolder, PendingRequest
from eagercache.service.pending_work import Outcome, PendingWork
from eagercache.service.request import Request
from eagercache.service.service import CompileService
from eagercache.service.settings import CUDA_WORKER_BYTES, ServiceSettings, for_gpu

pytestmark = pytest.mark.once

HERE = "an environment"
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
OTHER = "GPU-ffffffff-89ab-cdef-0123-456789abcdef"
SHARED = {"free_bytes": 70 << 30, "total_bytes": 80 << 30, "shared": True}
STRANGER = 1  # the process 1 is in no group of ours


def _request(digit: str, *, gpu: int | None, calls: int = 1, rows: int = 4) -> Request:
    description = {
        "op": "aten::tanh",
        "overload": "",
        "dispatch_key": "CPU" if gpu is None else "CUDA",
        "digest": 64 * digit,
        "calls": calls,
        "native_ns": 1000.0,
        "args": [{"kind": "tensor", "dtype": "float32", "sizes": [rows], "device": "cuda:0"}],
    }
    settings = ServiceSettings("nowhere", HERE, gpu=gpu)
    return Request(description, print, settings, 0.0, 0.0, 0, 0.0)


class _Gpus:
    """What the driver says of GPUs, by UUID."""

    def __init__(self) -> None:
        self.uses: dict[str, Use] = {}
        self.groups = {os.getpgid(0)}

    def put(self, uuid: str, *pids: int, **facts: Any) -> None:
        self.uses[uuid] = Use(**{**SHARED, **facts}, pids=frozenset(pids))

    def gpu(self, uuid: str = GPU) -> IdleGpu:
        return IdleGpu(uuid, self.uses.get)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gpus]:
    """A machine without any; each look is a new one."""
    monkeypatch.setattr(idle_gpu, "LOOK_SECONDS", 0.0)
    yield _Gpus()


# ---- what is left --------------------------------------------------------------------------------


def test_requests_for_a_gpu_are_left_with_its_name(cache: Path) -> None:
    folder = PendingFolder(cache)
    three = [_request("1", gpu=None), _request("2", gpu=0), _request("3", gpu=1)]
    assert folder.write(three, HERE, {0: GPU}) == 2  # how the second GPU is called is not known
    found = {one.digest[0]: one for one in folder.read(HERE)}
    assert {name: one.gpu for name, one in found.items()} == {"1": "", "2": GPU}
    assert folder.begin(found["2"]).gpu == GPU
    assert {one.gpu for one in folder.read(HERE)} == {"", GPU}


@pytest.mark.parametrize(
    "damage",
    [
        {"gpu": ""},
        {"gpu": "GPU-0"},
        {"gpu": "../GPU"},
        {"description": {"digest": 64 * "2", "op": "a", "dispatch_key": "CPU"}},
        {"description": {"digest": 64 * "2", "op": "a", "dispatch_key": "CUDA", "kind": "module"}},
    ],
)
def test_a_damaged_one_is_removed(cache: Path, damage: dict[str, Any]) -> None:
    folder = PendingFolder(cache)
    assert folder.write([_request("2", gpu=0)], HERE, {0: GPU}) == 1
    (path,) = folder.path.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    assert folder.read(HERE) == [] and not path.exists()


def test_a_gpus_workers_see_it_by_its_name() -> None:
    settings = for_gpu(ServiceSettings("nowhere", HERE, extra_environment={"A": "1"}), 0, GPU)
    assert settings.extra_environment == {"A": "1", "CUDA_VISIBLE_DEVICES": GPU}
    assert (settings.gpu, settings.memory_bytes) == (0, CUDA_WORKER_BYTES)


def test_what_had_no_room_beside_the_program_is_left_too(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader thread's way of it, with a GPU that is played."""
    answers: list[tuple[str, ...]] = []
    core = SimpleNamespace(
        complete=lambda *words: answers.append(words), cuda_compute_mode=lambda index: 0
    )
    monkeypatch.setattr(compile_requests, "core", core)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 30, 80 << 30))
    service = CompileService(ServiceSettings(str(cache), HERE, gpu=3))
    monkeypatch.setattr(session, "cuda_compile_service", lambda gpu: {3: service}[gpu])
    asked = {**_request("1", gpu=3).description}
    asked["args"] = [{**asked["args"][0], "device": "cuda:3"}]
    compile_requests._submit(json.dumps(asked))
    assert [words[:2] for words in answers] == [(64 * "1", "native")]
    assert "GPU 3 has 1024 MiB free" in answers[0][2]
    service.close()
    folder = PendingFolder(cache)
    assert folder.write(service.left_open, HERE, {3: GPU}) == 1
    (left,) = folder.read(HERE)
    assert left.gpu == GPU and left.description["args"][0]["device"] == "cuda:0"


def test_of_what_waits_for_the_end_the_most_useful_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagercache.service.service.MOST_FOR_LATER", 2)
    service = CompileService(ServiceSettings(str(cache), HERE, gpu=0))
    for digit, calls in (("1", 5), ("2", 1), ("3", 7), ("3", 7)):
        service.keep_for_later(_request(digit, gpu=0, calls=calls).description)
    service.keep_for_later({**_request("4", gpu=0, calls=9).description, "again": 1})
    assert service.wait(0.0)  # nobody waits for them
    service.close()
    service.keep_for_later(_request("5", gpu=0, calls=9).description)
    assert [one.description["digest"][0] for one in service.left_open] == ["1", "3"]


# ---- when a GPU may be used ----------------------------------------------------------------------


def test_a_gpu_is_free_while_nobody_else_is_on_it(gpus: _Gpus) -> None:
    gpu, ours = gpus.gpu(), gpus.groups
    assert not gpu.could_have(1) and not gpu.is_free_for(1, ours)  # it is not there
    gpus.put(GPU)
    assert gpu.could_have(80 << 30) and not gpu.could_have(81 << 30)
    assert gpu.is_free_for(70 << 30, ours) and not gpu.is_free_for(71 << 30, ours)
    gpus.put(GPU, os.getpid())
    assert gpu.is_free_for(1, ours) and not gpu.is_wanted(ours)
    assert not gpu.is_free_for(1, set()) and gpu.is_wanted(set())
    gpus.put(GPU, os.getpid(), STRANGER)
    assert not gpu.is_free_for(1, ours) and gpu.could_have(1) and gpu.is_wanted(ours)
    gpus.put(GPU, os.getpid(), 1 << 22)  # a number that no process here has
    assert not gpu.is_free_for(1, ours) and gpu.is_wanted(ours)
    gpus.put(GPU, shared=False)
    assert not gpu.is_free_for(1, ours) and not gpu.could_have(1)


def test_where_our_worker_is_not_shown_nothing_goes_on(gpus: _Gpus) -> None:
    gpus.put(GPU)
    gpu, ours = gpus.gpu(), gpus.groups
    assert not gpu.is_wanted(ours) and not gpu.cannot_see(answered=False)  # no context yet
    assert gpu.cannot_see(answered=True)
    assert not gpu.could_have(1) and not gpu.is_free_for(1, ours)
    seen = gpus.gpu()
    gpus.put(GPU, os.getpid())
    assert not seen.is_wanted(ours)
    gpus.put(GPU)
    assert not seen.cannot_see(answered=True) and seen.could_have(1)  # it has ended, being idle


def test_a_gpu_that_is_gone_is_left(gpus: _Gpus) -> None:
    gpus.put(GPU, os.getpid())
    gpu = gpus.gpu()
    assert not gpu.is_wanted(gpus.groups)
    gpus.uses.clear()
    assert gpu.is_wanted(gpus.groups)


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    assert use_of("GPU-0") is None
    if not Path("/dev/nvidiactl").exists():
        assert use_of(GPU) is None


# ---- going on ------------------------------------------------------------------------------------


class _Store:
    def find(self, digest: str, /) -> Any:
        """It is empty."""
        return None


class _Service:
    """Answers nothing; ``closed`` says whether its workers were ended."""

    def __init__(self, groups: set[int]) -> None:
        self._groups = groups
        self.closed = False

    def worker_groups(self) -> set[int]:
        """Of the workers that are played."""
        return set() if self.closed else self._groups

    def reconfigure(self, **_: Any) -> None:
        """Nothing depends on it."""

    def submit(self, description: dict[str, Any], on_done: Any, *, crashes: int = 0) -> None:
        """It is never done."""

    def close(self) -> None:
        """Ends its workers."""
        self.closed = True


def _left(cache: Path, *requests: Request) -> list[PendingRequest]:
    folder = PendingFolder(cache)
    assert folder.write(requests, HERE, {0: GPU, 1: OTHER}) == len(requests)
    return folder.read(HERE)


class _Lingering(linger_main.Lingerer):
    """One on an idle machine. It rests for a moment, and ends ``after`` so many rests."""

    def __init__(
        self, cache: Path, gpus: _Gpus, monkeypatch: pytest.MonkeyPatch, after: int = 3
    ) -> None:
        monkeypatch.setattr(linger_main, "free_bytes", lambda: 8 << 30)
        monkeypatch.setattr(linger_main, "IdleGpu", lambda uuid: IdleGpu(uuid, gpus.uses.get))
        super().__init__(str(cache), time.monotonic() + 600, 0, whatever_the_load=True)
        self.services: dict[str, _Service] = {}
        self.work = PendingWork(PendingFolder(cache), HERE, _Store(), self._made)
        self.rests = after
        self._groups = gpus.groups

    def _made(self, gpu: str) -> Any:
        return self.services.setdefault(gpu, _Service(self._groups))

    def _rest(self, work: PendingWork) -> None:
        self.rests -= 1
        if self.rests == 0:
            self._end = 0.0

    def chosen(self) -> str:
        """The first digits of the requests that come next."""
        return "".join(one.digest[0] for one in self._choose(self.work, self.work.left()))


def test_requests_of_free_gpus_come_before_those_of_gpus_in_use(
    cache: Path, gpus: _Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    _left(
        cache,
        _request("1", gpu=0, calls=9),
        _request("5", gpu=1, calls=5, rows=1 << 40),
        _request("2", gpu=1, calls=4),
        _request("3", gpu=None, calls=3),
        _request("4", gpu=1, calls=2),
    )
    gpus.put(GPU, STRANGER)
    gpus.put(OTHER)
    lingering = _Lingering(cache, gpus, monkeypatch)
    assert lingering.chosen() == "24"
    gpus.put(OTHER, STRANGER)
    assert lingering.chosen() == "3"
    gpus.put(GPU)
    assert lingering.chosen() == "1"


def test_it_waits_for_a_gpu_and_not_for_one_that_cannot_come(
    cache: Path, gpus: _Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    _left(cache, _request("1", gpu=0))
    gpus.put(GPU, STRANGER)
    lingering = _Lingering(cache, gpus, monkeypatch)
    assert lingering.chosen() == "" and lingering._said == "waits for a GPU"
    assert lingering.rests == 0
    gpus.uses.clear()
    lingering = _Lingering(cache, gpus, monkeypatch)
    assert lingering.chosen() == "" and lingering.rests == 3


def test_what_is_left_while_it_waits_is_seen(
    cache: Path, gpus: _Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    _left(cache, _request("1", gpu=0))
    gpus.put(GPU, STRANGER)
    lingering = _Lingering(cache, gpus, monkeypatch)
    rest = lingering._rest

    def rests(work: PendingWork) -> None:
        rest(work)
        PendingFolder(cache).write([_request("2", gpu=None)], HERE)

    monkeypatch.setattr(lingering, "_rest", rests)
    assert lingering.chosen() == "2"


@pytest.mark.parametrize("sees", [True, False])
def test_a_gpu_is_left_to_a_program_that_comes_or_cannot_be_seen(
    cache: Path, gpus: _Gpus, sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,) = _left(cache, _request("1", gpu=0))
    gpus.put(GPU)
    lingering = _Lingering(cache, gpus, monkeypatch)
    assert lingering.chosen() == "1"
    lingering.work._submit(request, lingering.work.service(GPU))
    assert not lingering._is_over(lingering.work)
    service = lingering.services.pop(GPU)
    assert not service.closed and PendingFolder(cache).read(HERE)[0].attempts == 1
    if sees:
        gpus.put(GPU, os.getpid(), STRANGER)
    else:
        lingering.work.outcomes.append(Outcome("a", "kernel"))
    assert not lingering._is_over(lingering.work)  # only the GPU is left
    assert service.closed
    (left,) = PendingFolder(cache).read(HERE)
    assert left.attempts == 0
    gpus.put(GPU)
    assert lingering.chosen() == ("1" if sees else "")


def test_warm_takes_what_has_room_though_a_program_is_there(
    cache: Path, gpus: _Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pending, "use_of", gpus.uses.get)
    left = _left(
        cache,
        _request("1", gpu=0, calls=9, rows=1 << 40),
        _request("2", gpu=0, calls=8),
        _request("3", gpu=None, calls=2),
    )

    def digits() -> str:
        return "".join(one.digest[0] for one in warm_pending._for_one_device(left))

    assert digits() == "3"  # there is no such GPU
    gpus.put(GPU, STRANGER)
    assert digits() == "2"
    assert warm_pending._for_one_device(left[:1]) == []
