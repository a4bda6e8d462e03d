"""Training of modules that answer with objects, as language models do; losses in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

HERE = str(Path(__file__).parents[1] / "zoos")

PROGRAM = """
import copy, sys
sys.path.insert(0, {here!r})
import torch, eagercache, training_zoo
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
model = training_zoo.make("Caching")
other = copy.deepcopy(model)
x = training_zoo.example("Caching").detach()

def both(backward):
    '''Gradients, and what was raised, of either; and the kernel's answer.'''
    results = []
    for own, call in ((model, model), (other, lambda x: type(other).forward(other, x))):
        given = x.clone().requires_grad_()
        own.zero_grad()
        answer = call(given)
        try:
            backward(answer)
            raised = ""
        except RuntimeError as error:
            raised = str(error).split(":")[0]
        found = [given.grad, *(p.grad for p in own.parameters())]
        results.append((found, raised, answer))
    (mine, mine_raised, answer), (its, its_raised, _) = results
    alike = all(
        (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-5))
        for a, b in zip(mine, its, strict=True)
    )
    return [alike, mine_raised, its_raised], answer

def written(answer):
    with torch.no_grad():
        answer["held"].keys[1].add_(1)
    answer["loss"].backward()

with eagercache.enable(ops=(), modules="auto", training=True, on_miss="wait", choose="always"):
    for _ in range(3):
        model(x.clone().requires_grad_())["loss"].backward()
    rows = {{}}
    rows["loss"], one = both(lambda answer: answer["loss"].backward())
    rows["again"], two = both(lambda answer: answer["loss"].backward())
    rows["object"], _ = both(lambda answer: answer["held"].keys[0].sum().backward())
    rows["object and loss"], _ = both(
        lambda answer: (answer["held"].keys[1].sum() * 2 + answer["loss"]).backward())
    rows["written"], _ = both(written)
    (row,) = [row for part, row in manager.stats() if part is model]
    lines = explain_module(model)
held = one["held"]
report(
    rows=rows, hits=row.training_hits, lines=lines, count=held.count,
    kind=type(held) is training_zoo.Held, fresh=held is not two["held"],
    nodes=sorted({{key.grad_fn.name() for key in held.keys}}),
    compiles=eagercache.stats().compiles,
)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw."""
    store = tmp_path_factory.mktemp("objects") / "cache"
    store.mkdir(mode=0o700)
    report = run_program(PROGRAM.format(here=HERE), store, timeout=500, fills=True)
    assert isinstance(report, dict)
    return report


def test_an_answer_with_an_object_has_kernels(found: dict[str, Any]) -> None:
    assert found["hits"] >= 7, found["lines"]
    assert found["kind"] and found["fresh"] and found["count"] == 2
    assert found["nodes"] == ["EagercacheModuleBackward"]


@pytest.mark.parametrize("name", ["loss", "again", "object", "object and loss", "written"])
def test_gradients_are_eagers_also_those_of_what_the_object_holds(
    name: str, found: dict[str, Any]
) -> None:
    alike, mine, its = found["rows"][name]
    assert alike and mine == its
    assert bool(its) == (name == "written")


EVALUATION = f"""
import sys
sys.path.insert(0, {HERE!r})
import torch, eagercache, training_zoo
from eagercache.modules.manager import manager, explain_module
torch.set_num_threads(1)
class Pictures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 5, 3, padding=1)
    def forward(self, pictures, classes):
        scores = self.convolution(pictures)
        return scores, torch.nn.functional.cross_entropy(scores, classes, ignore_index=255)
def hits(model):
    return sum(row.hits for part, row in manager.stats() if part is model)
def ask(model, *call):
    try:
        return model(*call)
    except IndexError as error:
        return str(error)
labels, pictures = training_zoo.labels(), torch.randn(2, 3, 4, 4)
hidden = [torch.randn(2, 6, 16), torch.randn(2, 6, 16)]
classes = torch.randint(0, 5, (2, 4, 4))
classes[0, 1] = 255
none = torch.full_like(labels, -100)
cases = {{
    "tokens": (training_zoo.Labelled(), [(own, hidden) for own in (labels, none, labels + 60)]),
    "pictures": (Pictures(), [(pictures, own) for own in (classes, classes * 0, classes - 5)]),
}}
found = {{}}
with torch.no_grad():
    for name, (model, calls) in cases.items():
        natives = [ask(model, *call) for call in calls]
        eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
        model(*calls[0])
        answers, wrong = [ask(model, *call) for call in calls], ""
        mine, lines = hits(model), explain_module(model)
        eagercache.disable()
        try:
            torch.testing.assert_close(answers[:2], natives[:2], equal_nan=True)
        except AssertionError as error:
            wrong = str(error)
        found[name] = dict(hits=mine, wrong=wrong, raised=[answers[2], natives[2]], lines=lines)
report(**found)
"""


def test_a_loss_over_labels_has_a_kernel_without_gradients(tmp_path: Path) -> None:
    seen = run_program(EVALUATION, tmp_path, fills=True)
    for name in ("tokens", "pictures"):
        found = seen[name]
        assert found["hits"] == 2, found["lines"]
        assert not found["wrong"], f"{name}: {found['wrong']}"
        mine, native = found["raised"]
        assert isinstance(native, str) and "out of bounds" in native
        assert mine == native
