"""Kernels that index with values of a GPU, which nobody looks at before a call."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import eagercache
import pytest
import torch
from eagercache.modules.manager import explain_module, manager
from test_cuda_training import assert_as_close, step, three_steps
from torch import nn
from torch.nn import functional


class Window(nn.Module):
    """A bias for each pair of places, picked by a buffer, as Swin's attention has it."""

    def __init__(self, places: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * places - 1, heads))
        steps = torch.arange(places)
        self.register_buffer("places", (steps[:, None] - steps[None]) + places - 1)
        self.register_buffer("counted", (steps[:, None] - steps[None]) % places - places)
        self.mix = nn.Linear(places, places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table[self.places.view(-1)].view(*self.places.shape, -1).permute(2, 0, 1)
        other = self.table[self.counted].permute(2, 0, 1)  # from the end
        return torch.softmax(self.mix(x) + bias + other, -1)


class Rows(nn.Module):
    """Picks by its argument, in ways that may not count from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.table = nn.Parameter(torch.randn(32, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        picked = self.table.index_select(0, ids.view(-1)).view(*ids.shape, 16)
        return torch.tanh(self.words(ids) + picked) * 2


def numbers(kind: str) -> torch.Tensor:
    torch.manual_seed(1)
    if kind == "window":
        return torch.randn(2, 4, 16, 16, device="cuda")
    return torch.randint(32, (4, 16), device="cuda")


@pytest.mark.parametrize("kind", ["window", "rows"])
def test_a_module_that_indexes_trains_as_in_eager(kind: str) -> None:
    torch.manual_seed(0)
    model = (Window() if kind == "window" else Rows()).cuda().train()
    x = numbers(kind)
    other, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    real = x.double() if x.is_floating_point() else x
    for kernels in three_steps(model, x):
        assert_as_close(kernels, step(other, x), step(wide, real))


@pytest.mark.parametrize("kind", ["window", "rows"])
def test_a_module_that_indexes_answers_as_in_eager(kind: str) -> None:
    torch.manual_seed(0)
    model = (Window() if kind == "window" else Rows()).cuda().eval()
    x = numbers(kind)
    with torch.no_grad():
        native = model(x)
        with eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
            mine = [model(x) for _ in range(3)]
            hits = [row.hits for part, row in manager.stats() if part is model]
            if hits != [2]:
                pytest.fail(f"{hits} hits: {explain_module(model)[0][-300:]}", pytrace=False)
    for answer in mine:
        torch.testing.assert_close(answer, native, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_skips_what_eager_skips(dtype: torch.dtype) -> None:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores * 0.5, labels)

    loss.__annotations__ = {"scores": torch.Tensor, "labels": torch.Tensor, "return": torch.Tensor}
    made = eagercache.op(f"demo::loss_{str(dtype)[6:]}", autograd=False)(loss)
    scores = torch.randn(64, 1000, device="cuda", dtype=dtype)
    labels = torch.randint(1000, (64,), device="cuda")
    skipping = labels.clone()
    skipping[::3] = -100
    with eagercache.enable((), on_miss="wait", choose="always"):
        made(scores, labels)
        before = eagercache.stats().hits
        mine = made(scores, labels), made(scores, skipping)
        hits = eagercache.stats().hits - before
        if hits != 2:
            pytest.fail(str([(k.op, k.decision, k.reason) for k in eagercache.kernels()]))
    for answer, given in zip(mine, (labels, skipping), strict=True):
        torch.testing.assert_close(answer, loss(scores, given))


ENDS = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache
from eagercache.modules.manager import manager
from test_cuda_indices import Rows, Window, functional, numbers
kind, training = {kind!r}, {training}
if kind == "loss":
    @eagercache.op("demo::loss", autograd=False)
    def call(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores * 0.5, labels)
    good = torch.randn(64, 100, device="cuda"), torch.randint(100, (64,), device="cuda")
else:
    model = (Window() if kind == "window" else Rows()).cuda().train(training)
    good = (numbers(kind),)
    call = model
torch.set_grad_enabled(training)
with eagercache.enable((), modules="auto", training=training, on_miss="wait", choose="always"):
    for _ in range(3):
        call(*good)
    hits = eagercache.stats().hits
    hits += sum(row.hits + row.training_hits for _, row in manager.stats())
    assert hits >= 2, hits
    bad = (*good[:-1], good[-1].clone())
    if kind == "window":
        model.places[1, 1] = {value}
    else:
        bad[-1].view(-1)[3] = {value}
    try:
        answer = call(*bad)
        torch.cuda.synchronize()
        print("answered", bool(answer.isfinite().all()))
    except Exception as error:
        print("raised", type(error).__name__)
"""


OUTSIDE = [
    ("rows", -1, True),
    ("rows", 32, True),
    ("window", -1, False),
    ("window", 31, True),
    ("window", -32, True),
]


@pytest.mark.parametrize(
    ("kind", "value", "ends", "training"),
    [
        *((*row, training) for row in OUTSIDE for training in (False, True)),
        ("loss", -1, True, False),
        ("loss", 100, True, False),
    ],
)
def test_an_index_outside_ends_a_program_as_in_eager(
    kind: str, value: int, ends: bool, training: bool, tmp_path: Path
) -> None:
    text = ENDS.format(here=str(Path(__file__).parent), kind=kind, training=training, value=value)
    script = tmp_path / "ends.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=400, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("raised", "answered"))]
    assert lines == ["raised AcceleratorError" if ends else "answered True"], done.stderr[-2000:]
