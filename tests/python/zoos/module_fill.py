"""A store with kernels of the modules of module_zoo, for tests of several files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import module_zoo
import pytest
import torch
from conftest import module_hits as hits
from conftest import module_kernels
from eagercache.modules.manager import explain_module
from torch import nn

HERE = str(Path(__file__).parent)

# Fills the store, in a process of its own, and says what was compiled and how the answers compare.
FILL = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, module_zoo
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
eagercache.enable(ops=(), modules="auto", on_miss={on_miss!r}, choose="always")
rows = {{}}
with torch.no_grad():
    for name in {names!r}:
        model, x = module_zoo.make(name), module_zoo.example(name)
        answers = [model(x) for _ in range(4)]
        lines = explain_module(model)
        hits = sum(row.hits for part, row in manager.stats() if part in set(model.modules()))
        eagercache.disable()
        native = module_zoo.make(name)(x)
        eagercache.enable(ops=(), modules="auto", on_miss={on_miss!r}, choose="always")
        close = True
        if name not in ("Draws", "CountsInBuffer"):
            close = all(
                torch.allclose(a, b, atol=1e-6)
                for a, b in zip(torch.utils._pytree.tree_leaves(answers[-1]),
                                torch.utils._pytree.tree_leaves(native))
            )
        rows[name] = dict(hits=hits, lines=lines, close=close,
                          sums=len(getattr(model, "sums", [])),
                          calls=float(getattr(model, "calls", 0)),
                          differ=not torch.equal(answers[0], answers[1])
                          if isinstance(answers[0], torch.Tensor) else None)
report(rows=rows, compiles=eagercache.stats().compiles)
"""

NAMES = [
    "Block",
    "Words",
    "Picks",
    "Computes",
    "Views",
    "Prints",
    "Logs",
    "Warns",
    "Collects",
    "Appends",
    "Draws",
    "Remembers",
    "CountsInBuffer",
    "ReturnsInput",
    "Chatty",
    "Settles",
    "Conditional",
    "Loops",
]


@dataclass(frozen=True)
class Filled:
    """What the program that filled the store reported, and the store."""

    store: Path
    report: dict[str, Any]


def fill(folder: Path, run_program: Callable[..., dict[str, Any]]) -> Filled:
    """Compiles the kernels, in a process of its own."""
    store = folder / "cache"
    store.mkdir(mode=0o700)
    return Filled(store, run_program(command("wait", NAMES), store, timeout=600, fills=True))


def command(on_miss: str, names: Sequence[str]) -> str:
    """The program."""
    return FILL.format(here=HERE, on_miss=on_miss, names=list(names))


@pytest.fixture
def warm(filled_modules: Filled) -> Iterator[None]:
    """Kernels of the filled store answer in this process; nothing is compiled."""
    assert filled_modules.report["rows"]["Block"]["hits"] > 0, filled_modules.report
    with module_kernels(filled_modules.store):
        yield


@pytest.fixture
def own_store(filled_modules: Filled, tmp_path: Path) -> Path:
    """A copy of the filled store, to be changed."""
    assert filled_modules.report["rows"]["Block"]["hits"] > 0, filled_modules.report
    return Path(shutil.copytree(filled_modules.store, tmp_path / "cache"))


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the module's own forward answers."""
    return type(model).forward(model, *args, **kwargs)


def answered_by_kernel(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The module's answer to its next call, and whether a kernel gave it."""
    before = hits(model)
    answer = model(*args, **kwargs)
    return answer, hits(model) == before + 1


@pytest.fixture
def block(warm: None) -> nn.Module:
    """A block that its kernel answers."""
    model, x = module_zoo.make("Block"), module_zoo.example("Block")
    with torch.no_grad():
        model(x)
        answer, by_kernel = answered_by_kernel(model, x)
        assert by_kernel, explain_module(model)
        torch.testing.assert_close(answer, forward(model, x))
    return model
