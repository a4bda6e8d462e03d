"""Warm-ups on clusters: batches, lost machines, what machines send, and real ones on loopback."""

from __future__ import annotations

import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import real_servers
from conftest import clean_environment
from eagercache.ahead import cluster_task, engines
from eagercache.ahead.cluster import ATTEMPTS, MOST_TOGETHER, ClusterExecutor
from eagercache.ahead.cluster_task import Compiled, Job, Parcel, parcel_tier
from eagercache.ahead.engines import local_workers, open_engine
from eagercache.ahead.errors import WarmError
from eagercache.remote import catalogue
from eagercache.remote.entries import Exchange
from eagercache.remote.plan import RemotePlan
from remote_world import TEXT, World, key_of

pytestmark = pytest.mark.once

SECONDS = 60.0


class Machines:
    """An engine of threads, each of which does what it is told with a batch."""

    shown = "threads"

    def __init__(self, does: Callable[[Job, list[dict[str, Any]]], Any], workers: int = 2) -> None:
        self.workers = workers
        self.batches: list[list[str]] = []
        self.closed = False
        self._does = does
        self._pool = ThreadPoolExecutor(workers)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        job, descriptions = arguments
        self.batches.append([one["digest"] for one in descriptions])
        return self._pool.submit(self._does, job, descriptions)

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, BrokenExecutor)

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown()


def send(world: World, job: Job, *numbers: int, text: str = TEXT) -> dict[str, bytes]:
    """What a machine sends of a store of its own, signed with the warm-up's key."""
    key = world.folder / "job.pem"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_text(job.signing_key)
    parcel = Parcel()
    store = world.filled("machine", *numbers, text=text)
    exchange = Exchange(store, text, RemotePlan((), (job.public_key,), str(key)))
    for number in numbers:
        exchange.send(parcel_tier(parcel), key_of(number))
    return parcel.named


def answer(number: int, verdict: str = "kernel") -> dict[str, Any]:
    return {"digest": key_of(number), "verdict": verdict, "reason": "", "seconds": {}}


def run(world: World, machines: Machines, *numbers: int) -> tuple[dict[str, Any], ClusterExecutor]:
    """The answers by digest, each of which has to come once."""
    executor = ClusterExecutor(
        machines,
        world.store("here"),
        TEXT,
        choose="faster",
        numerics="accurate",
        search="quick",
        keys=("CPU",),
    )
    answers: dict[str, Any] = {}

    def take(response: dict[str, Any]) -> None:
        assert response["digest"] not in answers
        answers[response["digest"]] = response

    for number in numbers:
        executor.submit({"op": "aten::abs", "digest": key_of(number)}, take)
    end = time.monotonic() + SECONDS
    while len(answers) < len(numbers) and time.monotonic() < end:
        time.sleep(0.01)
    executor.close()
    assert machines.closed and len(answers) == len(numbers)
    return answers, executor


def test_what_machines_compile_is_published_here(world: World) -> None:
    def does(job: Job, descriptions: list[dict[str, Any]]) -> Compiled:
        numbers = [n for n in range(1, 13) if key_of(n) in {d["digest"] for d in descriptions}]
        kinds = [answer(n, "kernel" if n % 2 else "native") for n in numbers]
        return Compiled(f"node{numbers[0] % 2}", kinds, send(world, job, *numbers))

    machines = Machines(does, workers=1)
    answers, executor = run(world, machines, *range(1, 13))
    assert {one["verdict"] for one in answers.values()} == {"kernel", "native"}
    assert {e["key"] for e in world.store("here").entries()} == {key_of(n) for n in range(1, 13)}
    assert max(map(len, machines.batches)) <= MOST_TOGETHER
    assert sum(executor.counts.machines.values()) == len(machines.batches)
    assert executor.counts.lost == 0 and not executor.counts.refused


def test_a_batch_whose_machine_is_lost_is_tried_again_one_by_one(world: World) -> None:
    poison = key_of(3)

    def does(job: Job, descriptions: list[dict[str, Any]]) -> Compiled:
        digests = [one["digest"] for one in descriptions]
        if poison in digests:
            raise BrokenExecutor("the node is gone")
        numbers = [n for n in range(1, 6) if key_of(n) in digests]
        return Compiled("node", [answer(n) for n in numbers], send(world, job, *numbers))

    machines = Machines(does, workers=1)
    answers, executor = run(world, machines, *range(1, 6))
    assert answers[poison]["verdict"] == "failed" and answers[poison]["failure"] == "transient"
    assert f"lost {ATTEMPTS} times" in answers[poison]["reason"]
    assert sum(poison in batch for batch in machines.batches) == ATTEMPTS == executor.counts.lost
    assert all(one["verdict"] == "kernel" for key, one in answers.items() if key != poison)


def test_an_error_of_the_call_itself_is_not_tried_again(world: World) -> None:
    def does(job: Job, descriptions: list[dict[str, Any]]) -> Compiled:
        raise ModuleNotFoundError("No module named 'eagercache'")

    machines = Machines(does)
    answers, executor = run(world, machines, 1, 2)
    assert all("No module named" in one["reason"] for one in answers.values())
    assert executor.counts.lost == 0 and len(machines.batches) <= 2


@pytest.mark.parametrize("harm", ["other text", "altered", "nothing", "too few", "no batch"])
def test_what_a_machine_must_not_send_is_counted_and_not_published(world: World, harm: str) -> None:
    def does(job: Job, descriptions: list[dict[str, Any]]) -> Any:
        if harm == "no batch":
            return "nonsense"
        text = TEXT.replace("avx2", "avx512") if harm == "other text" else TEXT
        named = send(world, job, 1, text=text)
        if harm == "other text":
            (content,) = (content for name, content in named.items() if "/e/" in name)
            named[catalogue.entry_name(catalogue.environment_id(TEXT), key_of(1))] = content
        if harm == "altered":
            named = {name: content[:-1] + b"?" for name, content in named.items()}
        if harm == "nothing":
            named = {}
        return Compiled("node", [] if harm == "too few" else [answer(1)], named)

    answers, executor = run(world, Machines(does), 1)
    assert answers[key_of(1)]["verdict"] == "failed"
    assert world.store("here").entries() == []
    kinds = {"other text": "environment: cpu.isa", "altered": "signature"}
    if harm in kinds:
        assert executor.counts.refused == {kinds[harm]: 1}


def test_a_machine_of_another_kind_says_so_and_compiles_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    job = Job("torch.version: 1.0.0\n", "faster", "accurate", "quick", "", "", ("CPU",))
    compiled = cluster_task.compile_batch(job, [{"digest": key_of(1)}])
    assert "torch.version differs" in compiled.trouble and compiled.responses == []


def test_where_is_named_or_one_line_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_workers("local:8") == 8 and local_workers("dask://host") is None
    for bad in ("local:", "local:0", "local:x", "local"):
        with pytest.raises(WarmError, match="use local:8"):
            local_workers(bad)
    for bad in ("slurm://host", "dask://", "host:8786"):
        with pytest.raises(WarmError, match="is no cluster; use local:N"):
            open_engine(bad, gpu=False)
    with pytest.raises(WarmError, match="is no cluster"):
        open_engine("dask://host:99999999", gpu=False)
    if engines.importlib.util.find_spec("distributed") is not None:
        monkeypatch.setattr(engines, "_CONNECT_SECONDS", 1)
        with pytest.raises(WarmError, match="cannot be reached"):
            open_engine(f"dask://127.0.0.1:{real_servers.free_port()}", gpu=False)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WarmError, match=r"pip install 'eagercache\[ray\]'"):
        open_engine("ray://host", gpu=False)


PROGRAM = """
import torch
x = torch.randn(64, 96)
for _ in range(5):
    torch.var(x, -1); torch.softmax(x, -1)
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "program.py").write_text(PROGRAM)
    eagercache(folder, "record", "t.trace", "--", "program.py")
    return str(folder / "t.trace")


def eagercache(folder: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "eagercache", *arguments],
        env=clean_environment(**variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dasks_workers_compile_for_a_store_that_they_do_not_share(
    trace: str, tmp_path: Path
) -> None:
    real_servers.require("distributed")
    for name in ("here", "there"):
        (tmp_path / name).mkdir(mode=0o700)
    there = str(tmp_path / "there")
    with real_servers.dask_cluster(tmp_path, EAGERCACHE_DIR=there) as (url, pids):

        def kill() -> None:
            while not any((tmp_path / "there").iterdir()):
                time.sleep(0.05)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        # Workers that are killed over their batch are made anew, and the batch is done again.
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        warmed = eagercache(tmp_path, "warm", trace, "--dir", "here", "--on", url, "--json")
        assert not killer.is_alive()
    report = json.loads(warmed)
    assert report["ok"] and {e["state"] for e in report["entries"]} == {"compiled"}, warmed
    assert sum(report["machines"].values()) >= 1 and not report["refused"]
    again = json.loads(eagercache(tmp_path, "warm", trace, "--dir", "here", "--json"))
    assert {entry["state"] for entry in again["entries"]} == {"found"}


@pytest.mark.parametrize(("failures", "reached"), [(0, True), (1, True), (2, False)])
def test_a_server_of_rays_that_was_too_busy_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, failures: int, reached: bool
) -> None:
    asked = []

    def init(**options: Any) -> None:
        asked.append(options["address"])
        if len(asked) <= failures:
            raise ConnectionAbortedError(
                "Initialization failure from server:\nTraceback (most recent call last):\n"
                '  File "proxier.py", line 1, in Datapath\nRuntimeError: no channel\n'
            )

    ray = types.ModuleType("ray")
    ray.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    vars(ray).update(
        init=init, is_initialized=lambda: False, cluster_resources=lambda: {"CPU": 3.0}
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    if reached:
        assert engines._Ray("ray://host:1", "host", 1, gpu=False).workers == 3
    else:
        with pytest.raises(WarmError, match=r"cannot be reached: RuntimeError: no channel$"):
            engines.open_engine("ray://host:1", gpu=False)
    assert asked == ["ray://host:1"] * min(failures + 1, 2)


@pytest.mark.parametrize("by", ["auto", pytest.param("client", marks=pytest.mark.long)])
def test_rays_workers_do_the_same(trace: str, tmp_path: Path, by: str) -> None:
    """Ray's client has its server start a process, within a time that Ray sets."""
    real_servers.require("ray", "grpc")
    for name in ("here", "there"):
        (tmp_path / name).mkdir(mode=0o700)
    port = real_servers.free_port()
    there = str(tmp_path / "there")
    with real_servers.ray_cluster(tmp_path, port, EAGERCACHE_DIR=there) as url:
        where = {"auto": "ray://auto", "client": url}[by]
        variables = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
        warm = ("warm", trace, "--dir", "here", "--on", where, "--json")
        warmed = eagercache(tmp_path, *warm, **variables)
    report = json.loads(warmed)
    assert report["ok"] and {e["state"] for e in report["entries"]} == {"compiled"}, warmed
