"""What tests of training share: kernels for `training_zoo`, and comparisons with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import training_zoo
from eagercache.modules.manager import explain_module
from torch import nn

HERE = str(Path(__file__).parent)
NODE = "EagercacheModuleBackward"
NAMES = ("ConvNorm", "Attention", "Noisy", "Dropped", "Checkpointed")

# Compiles for every form of call that the tests make, and says how its calls were answered.
_FILL = """
import contextlib, sys
sys.path.insert(0, {here!r})
import torch, eagercache, training_zoo
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
eagercache.enable(
    ops=(), modules="auto", training=True, on_miss={on_miss!r}, choose="always"
)
rows = {{}}
for name in {names!r}:
    model, x = training_zoo.make(name), training_zoo.example(name)
    for _ in range(4):
        training_zoo.loss_of(model(x)).backward()
    rows[name] = dict(
        lines=explain_module(model),
        hits=[row.training_hits for part, row in manager.stats() if part is model],
        below=sum(row.training_hits for part, row in manager.stats() if part is not model
                  and part in set(model.modules())),
    )
model, x = training_zoo.make("Attention"), training_zoo.example("Attention")
for state in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
    for _ in range(3):
        with state:
            answer = model(x)
        if answer.requires_grad:
            training_zoo.loss_of(answer).backward()
(row,) = [row for part, row in manager.stats() if part is model]
other, x = training_zoo.make("Labelled"), training_zoo.example("Labelled")
for _ in range(3):
    training_zoo.loss_under_autocast(other, x, training_zoo.labels()).backward()
rows["Labelled"] = dict(lines=explain_module(other))
report(rows=rows, others=[row.training_hits, row.hits - row.training_hits],
       other_lines=explain_module(model), compiles=eagercache.stats().compiles)
"""


@dataclass(frozen=True)
class Trained:
    """A store's directory, and what the program that filled it reported."""

    store: Path
    report: dict[str, Any]


def fill(folder: Path, run_program: Callable[..., dict[str, Any]]) -> Trained:
    """Fills a store below ``folder``."""
    store = folder / "cache"
    store.mkdir(mode=0o700)
    return Trained(store, run_program(fill_program("wait"), store, timeout=900, fills=True))


def fill_program(on_miss: str) -> str:
    """The program that makes the calls of `training_zoo`; another one finds kernels for all."""
    return _FILL.format(here=HERE, on_miss=on_miss, names=NAMES)


def pair(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """(module that kernels answer, its copy that is eager's, an argument)."""
    model, x = training_zoo.make(name), training_zoo.example(name)
    other = copy.deepcopy(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x)
    answer = model(x)
    (node,) = {leaf.grad_fn.name() for leaf in leaves_of(answer)}
    assert node == NODE, explain_module(model)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(before[key])
    return model, other, x


def leaves_of(answer: Any) -> list[torch.Tensor]:
    """The tensors of an answer."""
    return list(torch.utils._pytree.tree_leaves(answer))


def eager(model: nn.Module, *args: Any) -> Any:
    """The answer of the module's own forward."""
    return type(model).forward(model, *args)


def leaf(x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """Another argument like ``x``."""
    return (x.detach() + shift).requires_grad_()


def assert_alike(mine: torch.Tensor, theirs: torch.Tensor, name: str = "", far: float = 1) -> None:
    """Equal but for rounding, which is as large as the largest number makes it, times ``far``."""
    scale = max(float(theirs.abs().max()), 1.0)
    torch.testing.assert_close(
        mine, theirs, rtol=1e-4 * far, atol=2e-5 * far * scale, msg=name or None
    )


def assert_same_gradients(model: nn.Module, other: nn.Module, far: float = 1) -> None:
    """The parameters' gradients are alike, and missing on both sides or on none."""
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert_alike(mine.grad, theirs.grad, name, far)
            assert mine.grad.stride() == theirs.grad.stride()
            assert mine.grad.dtype == theirs.grad.dtype


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers are alike, counters exactly."""
    for name, mine in model.state_dict().items():
        theirs = other.state_dict()[name]
        if mine.is_floating_point():
            assert_alike(mine, theirs, name)
        else:
            assert torch.equal(mine, theirs), name
