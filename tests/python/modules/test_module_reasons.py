"""What `explain_module` says of a module that has no kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import clean_environment, run_python
from eagercache.modules import known, names
from eagercache.modules.known import KnownModules

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("state", "reason"), [("refused", "its attributes change"), ("watched", "")]
)
def test_a_refused_module_says_why_although_it_had_kernels(
    state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Linear(2, 2)
    modules = KnownModules()
    modules.add(module)
    info = modules.find(module)
    assert info is not None
    info.kernels[False] = 1
    info.reasons[False] = "its attributes change"
    row: dict[str, Any] = dict.fromkeys(("hits", "pending", "native", "training_hits"), 0)
    row |= {"module": module, "state": state, "aside_reasons": {}, "replayed": 0, "replay": ""}
    monkeypatch.setattr(
        known, "core", SimpleNamespace(module_stats=lambda: [row], module_identity=lambda _: "")
    )
    ((_, stats),) = modules.stats()
    assert stats.reason == reason


WAITS = """
import time
import torch
import eagercache
from eagercache.service.request_queue import RequestQueue
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))
# Nobody takes what is asked for.
RequestQueue.wait_for_work = lambda self, process: time.sleep(600)
eagercache.enable((), modules=nn.Sequential)
while not eagercache.stats().not_yet:
    with torch.no_grad():
        model(torch.ones(2, 8))
print(eagercache.stats())
print(*eagercache.explain_module(model)[:1])
"""


def test_a_module_whose_kernel_is_not_there_yet_says_so(tmp_path: Path) -> None:
    environment = clean_environment(EAGERCACHE_DIR=str(tmp_path), EAGERCACHE_LINGER="0")
    counts, line = run_python(WAITS, environment).stdout.splitlines()
    assert "0 calls and 0 of whole modules by kernels" in counts
    assert "0 compiles, 0 failures, 1 outstanding>" in counts
    assert line.endswith("; a kernel is being made")


COMPILED = """
import torch
import eagercache
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
eagercache.enable((), modules="auto", on_miss="native")
with torch.no_grad():
    model(torch.ones(2, 8))
    torch.compile(model, backend="eager")(torch.ones(2, 8))
print(eagercache.explain_module(model)[0])
"""


def test_what_torch_compile_was_given_says_so(tmp_path: Path) -> None:
    environment = clean_environment(EAGERCACHE_DIR=str(tmp_path))
    said = run_python(COMPILED, environment).stdout
    assert said.endswith("; refused: torch.compile was given it\n")


def test_hooks_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def hook(*_: object) -> None:
        pass

    handle = model[1].register_forward_hook(hook)
    assert names.hooks_of(model) == f"hooks on 1 ({__name__})"
    handle.remove()
    assert names.hooks_of(model) == "hooks that are gone, or on all modules"
