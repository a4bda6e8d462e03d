"""Modules whose gain noise hid, which are measured again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import eagercache
import module_zoo
import pytest
import torch
from conftest import module_hits as hits
from conftest import module_kernels
from eagercache.modules.manager import explain_module, manager
from eagercache.runtime.session import session
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.jobs import module_job
from eagercache.worker.modules.compile import ModuleResult
from eagercache.worker.timing.timing import Timing
from module_fill import answered_by_kernel, forward, own_store
from torch import nn

__all__ = ["own_store"]

pytestmark = pytest.mark.usefixtures("filled_modules")


class PlayedService:
    """Stands for the compile service and remembers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]] = []

    def submit(
        self, description: dict[str, Any], on_done: Callable[[dict[str, Any]], None]
    ) -> None:
        self.asked.append((description, on_done))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> PlayedService:
    """Stands for the compile service."""
    played = PlayedService()
    monkeypatch.setattr(session, "compile_service", lambda: played)
    return played


def undecided(store: Any, kernel: dict[str, Any], measured: int) -> None:
    """Puts the verdict into the kernel's place that noise hid whether it is faster."""
    store.remove(kernel["key"])
    facts = {**kernel["facts"], "reason": "undecided", "measured": str(measured)}
    store.publish({"key": kernel["key"], "kind": "native", "facts": facts})


def meet_in_background(store: Path, model: nn.Module, x: torch.Tensor) -> None:
    """Calls the module until what the store says of it has been heard."""
    eagercache.enable(
        ops=(), modules="auto", on_miss="background", choose="always", cache_dir=store
    )
    for _ in range(4):
        model(x)
        manager.wait()


def test_a_module_whose_gain_noise_hid_is_measured_again_and_gets_its_kernel(
    own_store: Path, service: PlayedService
) -> None:
    with module_kernels(own_store), torch.no_grad():
        entries = session.store.entries()
        (kernel,) = [
            row
            for row in entries
            if row["kind"] == "kernel" and row["facts"]["op"].endswith("module_zoo.Block")
        ]
        objects = [("so", str(next(own_store.rglob(f"{kernel['objects'][0]['digest']}.so"))))]
        undecided(session.store, kernel, 1)
        model, x = module_zoo.make("Block"), module_zoo.example("Block")
        meet_in_background(own_store, model, x)
        assert hits(model) == 0 and "undecided" in explain_module(model)[0]
        ((first, answer_first),) = service.asked
        assert (first["digest"], first["again"]) == (kernel["key"], 1) and first["payload"]

        answer_first({"verdict": "failed"})  # nothing is known that was not
        assert len(service.asked) == 1
        meet_in_background(own_store, model, x)
        _, answer_second = service.asked[1]
        undecided(session.store, kernel, 2)
        answer_second({"verdict": "native"})
        third, answer_third = service.asked[2]
        assert third["again"] == 2 and hits(model) == 0

        session.store.remove(kernel["key"])
        kept = ("key", "kind", "facts", "cpu_features")
        manifest = {name: kernel[name] for name in kept}
        session.store.publish(manifest, objects)
        answer_third({"verdict": "kernel"})
        answer, by_kernel = answered_by_kernel(model, x)
        assert by_kernel and len(service.asked) == 3
        torch.testing.assert_close(answer, forward(model, x))


def test_the_third_measurement_of_a_module_is_final(
    own_store: Path, service: PlayedService
) -> None:
    with module_kernels(own_store), torch.no_grad():
        for kernel in session.store.entries():
            if kernel["kind"] == "kernel":
                undecided(session.store, kernel, 3)
        model, x = module_zoo.make("Block"), module_zoo.example("Block")
        meet_in_background(own_store, model, x)
        assert "undecided" in explain_module(model)[0]
        assert not [row for row, _ in service.asked if "again" in row]


@pytest.mark.parametrize(
    ("before", "reason", "disturbed", "after"),
    [
        (0, "undecided", False, "1"),
        (1, "undecided", False, "2"),
        (0, "undecided", True, "1"),  # it is to be measured
        (2, "undecided", True, "2"),  # and this was no measurement
        (0, "slower", False, None),
    ],
)
def test_a_worker_counts_the_measurements_of_a_module_that_noise_hid(
    before: int,
    reason: str,
    after: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    disturbed: bool,
) -> None:
    timing = Timing(2.0, 1.0, 0.4, 1.2, 9, 1, disturbed=disturbed)
    result = ModuleResult(tmp_path, {}, timing)
    monkeypatch.setattr(module_job, "compile_module", lambda *_: result)
    monkeypatch.setattr(module_job, "decide", lambda *_: (False, reason))
    core = mock.Mock()
    job = module_job.ModuleJob({"description": {}, "margin": 0.03, "choose": "faster"}, core)
    monkeypatch.setattr(job, "_enter", lambda _: None)
    job._directory, job._measured = tmp_path, before
    tools = mock.Mock(spec=Tools)
    job.begin(lambda: None, lambda _: tools)
    assert job.outcome is not None
    assert (job.outcome.verdict, job.outcome.reason) == ("native", reason)
    tools.rest.assert_called_once()
    core.forget_object_classes.assert_called_once()
    assert job.outcome.facts == ({} if after is None else {"measured": after})
