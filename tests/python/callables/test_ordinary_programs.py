"""What ordinary programs do to their modules, against eager run in the same process."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_program

pytestmark = pytest.mark.once

ASSIGNS = """
import copy, torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)
        self.register_buffer("load", torch.zeros(16))

    def forward(self, x):
        y = self.dense(x).tanh()
        self.load += y.detach().abs().sum(0)
        return y

torch.set_num_threads(1)
model = Counts()
other = copy.deepcopy(model)
right = []
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for step in range(4):
        x = torch.randn(8, 16)
        y = model(x)
        y.sum().backward()
        core.set_answering(False)
        z = other(x)
        z.sum().backward()
        core.set_answering(True)
        right.append(torch.allclose(y, z, atol=1e-5) and torch.allclose(model.load, other.load))
    hits = sum(row.training_hits for part, row in manager.stats() if part is model)
    lines = explain_module(model)
report(right=right, hits=hits, lines=lines,
       gradients=torch.allclose(model.dense.weight.grad, other.dense.weight.grad, atol=1e-4))
"""


def test_a_buffer_that_a_training_forward_assigns_in_place_has_a_kernel(cache: Path) -> None:
    # `Module.__setattr__` unwraps a function then, which tells objects apart by their addresses.
    found = run_program(ASSIGNS, cache, fills=True)
    assert all(found["right"]) and found["gradients"], found
    assert found["hits"] > 0, found


MARKS = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager

class Marks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x):
        y = self.dense(x).tanh()
        ANSWER

class Out:
    def __init__(self, y):
        self.y = y

torch.set_num_threads(1)
model, tags = Marks(), []
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for step in range(8):
        with torch.set_grad_enabled(step % 2 == 0):
            found = model(torch.randn(8, 16))
        tags.append(getattr(getattr(found, "y", found), "tag", None))
    lines = explain_module(model)
report(tags=tags, lines=lines)
"""


@pytest.mark.parametrize(
    "answer",
    ["y.tag = 'mine'; return y", "y.tag = 'mine'; return Out(y)"],
    ids=["tensor", "object"],
)
def test_a_tensor_that_the_forward_gives_an_attribute_has_it(cache: Path, answer: str) -> None:
    found = run_program(MARKS.replace("ANSWER", answer), cache, fills=True)
    assert found["tags"] == ["mine"] * 8, found
    assert "it gives a tensor that it returns an attribute (tag)" in str(found["lines"]), found


ORDERS = """
import collections, torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

class Steps(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)
        self.steps = collections.OrderedDict([("add", 1.0), ("times", 2.0)][:count])

    def forward(self, x):
        x = self.dense(x).tanh()
        for name, value in self.steps.items():
            x = x + value if name == "add" else x * value
        return x

torch.set_num_threads(1)
right, hits, lines = [], [], []
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for count in (1, 2):
        model, x = Steps(count), torch.randn(8, 16)
        for _ in range(2):
            for _ in range(3):
                answer = model(x)
            core.set_answering(False)
            right.append(torch.allclose(answer, model(x), atol=1e-5))
            core.set_answering(True)
            model.steps.move_to_end("add")
        hits.append(sum(row.hits for part, row in manager.stats() if part is model))
        lines += explain_module(model)
report(right=right, hits=hits, lines=lines)
"""


def test_another_order_of_an_ordered_dict_is_not_missed(cache: Path) -> None:
    found = run_program(ORDERS, cache, fills=True)
    assert all(found["right"]), found
    assert all(hits > 1 for hits in found["hits"]), found


LAZY = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager

class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = torch.nn.LazyLinear(16), torch.nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.dense(x)).tanh()

torch.set_num_threads(1)
model = Lazy()
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for _ in range(4):
        model(torch.randn(8, 16))
    hits = [row.hits for part, row in manager.stats() if part is model]
report(hits=hits, lines=explain_module(model))
"""


def test_a_module_has_a_kernel_once_its_lazy_parameters_have_sizes(cache: Path) -> None:
    found = run_program(LAZY, cache, fills=True)
    assert found["hits"][0] > 0, found


FUNCTION = """
import torch, eagercache
from torch import Tensor

@eagercache.op("ordinary::tagged")
def tagged(x: Tensor) -> Tensor:
    y = x.tanh() * 2
    y.tag = "mine"
    return y

torch.set_num_threads(1)
with eagercache.enable((), on_miss="wait", choose="always"):
    print([getattr(tagged(torch.randn(64, 64)), "tag", None) for _ in range(4)])
"""


def test_a_function_that_gives_its_answer_an_attribute_is_refused(
    cache: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(FUNCTION)
    found = run_program(f"import runpy; runpy.run_path({str(program)!r})", cache, fills=True)
    assert found["stdout"].strip() == str(["mine"] * 4), found


AT_EACH_CALL = """
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

class Windows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)
        self.size, self.scale, self.name = 8, 0.5, "wide"

    def forward(self, x):
        self.size = min(8, x.shape[-1])  # as Swin sets its windows
        self.scale, self.name = 0.5, "wide"
        return self.dense(x)[:, : self.size].tanh() * self.scale

class Lists(Windows):
    def forward(self, x):
        self.held = []
        return super().forward(x)

torch.set_num_threads(1)
looks, look = {}, type(manager._looks).look
def counted(self, reference):
    looks[type(reference()).__name__] = looks.get(type(reference()).__name__, 0) + 1
    look(self, reference)
type(manager._looks).look = counted
x, lines, right = torch.randn(4, 16), {}, True
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for kind in (Windows, Lists):
        model = kind().eval()
        for _ in range(60):
            answer = model(x)
        lines[kind.__name__] = explain_module(model)[0]
        core.set_answering(False)
        right &= torch.allclose(answer, model(x), atol=1e-5)
        core.set_answering(True)
    model = Windows().eval()
    for number in (16, 4, 16):  # another value is another module
        x = torch.randn(4, number)
        model.dense = torch.nn.Linear(number, 16)
        for _ in range(4):
            answer = model(x)
        core.set_answering(False)
        right &= torch.allclose(answer, model(x), atol=1e-5)
        core.set_answering(True)
report(looks=looks, lines=lines, right=right)
"""


def test_a_forward_that_assigns_what_is_there_has_a_kernel(cache: Path) -> None:
    found = run_program(AT_EACH_CALL, cache, fills=True)
    assert found["right"], found
    assert "59 by kernel" in found["lines"]["Windows"], found["lines"]
    assert "another thing of its attribute" in found["lines"]["Lists"], found["lines"]
    assert found["looks"]["Lists"] < 20, found["looks"]


PENALTY = """
import copy, torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = torch.tanh(self.norm(self.dense(x))) - self.mean
        self.mean.lerp_(y.detach().mean(0) + 1, 0.5)
        return (y * y).tanh()

def alike(one, other):
    return all(torch.allclose(a, b, atol=1e-4, rtol=1e-3) for a, b in zip(one, other, strict=True))

def penalty(model, inputs):
    answers = [model(x) for x in inputs]  # each of which moves the mean
    model.zero_grad()
    (first,) = torch.autograd.grad(answers[0].sum(), inputs[0], create_graph=True)
    first.square().sum().backward()
    batch = torch.stack([torch.ones(8, 16), torch.rand(8, 16)])
    (rows,) = torch.autograd.grad(answers[1], inputs[1], batch, is_grads_batched=True)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [first, rows, *gradients, *model.buffers()]

torch.set_num_threads(1)
model = Centred()
other, right = copy.deepcopy(model), []
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for step in range(4):
        inputs = [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
        torch.manual_seed(step)
        found = penalty(model, inputs)
        core.set_answering(False)
        torch.manual_seed(step)
        right.append(alike(found, penalty(other, inputs)))
        core.set_answering(True)
    hits = sum(row.training_hits for part, row in manager.stats() if part is model)
    lines = explain_module(model)
report(right=right, hits=hits, lines=lines)
"""


def test_gradients_of_gradients_know_the_buffers_as_they_were_at_the_call(cache: Path) -> None:
    # The forward is run again for them: on what it read, not on what it and later calls wrote.
    found = run_program(PENALTY, cache, fills=True)
    assert all(found["right"]), found
    assert found["hits"] > 6, found


ANOMALY = """
import torch, eagercache, warnings
from eagercache.modules.manager import manager

class Rooted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.dense(x).tanh().abs().sqrt()

torch.set_num_threads(1)
warnings.simplefilter("ignore")
model, said = Rooted(), ""
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    hits = sum(row.training_hits for part, row in manager.stats() if part is model)
    try:
        with torch.autograd.detect_anomaly():
            model(torch.full((8, 16), float("nan"))).sum().backward()
    except RuntimeError as error:
        said = str(error)
report(hits=hits, said=said)
"""


def test_detecting_anomalies_names_the_operator_at_fault(cache: Path) -> None:
    found = run_program(ANOMALY, cache, fills=True)
    assert found["hits"] > 0, found
    assert "'SqrtBackward0' returned nan" in found["said"], found


LAYOUTS = """
import torch, eagercache
from eagercache.modules.manager import explain_module
torch.set_num_threads(1)
torch.manual_seed(0)

class Shrinks(torch.nn.Module):
    # As ConvNeXt does between its stages: what the convolution is given is channels_last in eager,
    # and so is the gradient of its weight.
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.shrink = torch.nn.Conv2d(8, 16, 2, stride=2)
        self.deep = torch.nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.mix = torch.nn.Linear(16, 16)

    def forward(self, x):
        y = self.shrink(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.mix(self.deep(y).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + y

def gradients(call):
    given = x.clone().requires_grad_()
    return torch.autograd.grad(call(given).square().mean(), [*model.parameters(), given])

model, x = Shrinks(), torch.randn(2, 8, 8, 8)
native = gradients(lambda given: Shrinks.forward(model, given))
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for _ in range(3):
        mine = gradients(model)
    lines = explain_module(model)[0]
report(lines=lines,
       strides=[[a.stride(), b.stride()] for a, b in zip(mine, native)],
       same=[torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, native)],
       plain=[one.is_contiguous() for one in native])
"""


def test_gradients_lie_as_eagers_do_where_the_kernel_lays_them_out_in_another_way(
    cache: Path,
) -> None:
    found = run_program(LAYOUTS, cache, fills=True)
    assert "2 with gradients" in found["lines"], found["lines"]
    assert all(found["same"]) and not all(found["plain"])
    assert all(mine == native for mine, native in found["strides"])
