"""Modules that are called with objects: caches, and whatever else has attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import object_world
import pytest
from conftest import run_program

HERE = str(Path(__file__).parents[1] / "zoos")

ALL_CASES = (
    object_world.PRELUDE
    + """def outcome(model, make):
    args, kwargs = make()
    answer = model(*args, **kwargs)
    return inside(answer, list(parts((args, kwargs)))), inside((args, kwargs))

rows = {{}}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for name, (function, calls, least) in list(object_world.CASES.items())[{half}::2]:
        model, wrong = object_world.Reader(function), []
        for turn in range(3):
            for index, make in enumerate(calls):
                mine = outcome(model, make)
                core.set_answering(False)
                eager = outcome(model, make)
                core.set_answering(True)
                if not is_close(mine, eager):
                    wrong.append([turn, index, str(mine)[:300], str(eager)[:300]])
        rows[name] = [hits(model), wrong, explain_module(model)[:1]]
report(rows=rows)
"""
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the programs."""
    path = tmp_path_factory.mktemp("objects") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="module")
def rows(store: Path) -> dict[str, Any]:
    """Each case: hits, answers that differ from eager's, the explanation."""
    found: dict[str, Any] = {}
    for half in range(2):
        program = ALL_CASES.format(here=HERE, half=half)
        found |= run_program(program, store, timeout=500, fills=True)["rows"]
    return found


@pytest.mark.parametrize("name", object_world.CASES)
def test_objects_hold_what_the_forward_puts_into_them(name: str, rows: dict[str, Any]) -> None:
    hits, wrong, lines = rows[name]
    assert not wrong, (wrong, lines)
    least = object_world.CASES[name][2]
    assert hits >= least, (hits, lines)
    assert least > 0 or hits == 0, (hits, lines)


GENERATE = """
import torch, transformers, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers={layers},
             num_attention_heads=4, num_key_value_heads=2, vocab_size=100)
torch.manual_seed(0)
made, config, more = {model}
model = made(config(**sizes, **more)).eval()
ids = torch.randint(3, 99, (2, 6))
mask = torch.ones_like(ids)
mask[0, :3] = 0  # a sample that is shorter than the other

def generate(**more):
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=16, pad_token_id=0, eos_token_id=None, **more)

ways = [dict(do_sample=False), dict(do_sample=True), dict(do_sample=False, num_beams=2),
        dict(do_sample=False, attention_mask=mask)]{chosen}
with torch.no_grad():
    expected = [generate(**way).tolist() for way in ways]
    with eagercache.enable((), modules="auto", on_miss={on_miss!r}, choose="always"):
        answers = []
        for _ in range(2):
            for way in ways:
                answers.append(generate(**way).tolist())
                manager.wait(200)
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        lines = explain_module(model)[:1]
report(same=answers == expected * 2, hits=hits, lines=lines)
"""


LLAMA = "transformers.LlamaForCausalLM, transformers.LlamaConfig, {}"
# Its caches keep the last tokens of eight, and a number of all that there were.
SLIDES = "transformers.MistralForCausalLM, transformers.MistralConfig, dict(sliding_window=8)"


# The first has two layers; what the others are about is in each.
@pytest.mark.parametrize(
    ("model", "layers", "chosen", "least"),
    [
        (LLAMA, 2, "[:1]", 16),
        pytest.param(LLAMA, 1, "[1:]", 48, marks=pytest.mark.once),
        pytest.param(SLIDES, 1, "[:1]", 20, marks=pytest.mark.once),
    ],
    ids=["alone", "other ways", "sliding window"],
)
def test_a_language_model_generates_what_it_does_in_eager(
    model: str, layers: int, chosen: str, least: int, store: Path
) -> None:
    program = GENERATE.replace("{chosen}", chosen).replace("{model}", model.replace("{}", "{{}}"))
    program = program.replace("{layers}", str(layers))
    made = run_program(program.format(on_miss="wait"), store, timeout=500, fills=True)
    assert made["same"], made["lines"]
    assert made["hits"] >= least, made["lines"]
    again = run_program(program.format(on_miss="native"), store)
    assert again["same"], again["lines"]
    assert again["hits"] >= least, again["lines"]


ANSWERS = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.table = {"sizes": [8]}

    def body(self, x):
        return self.last(self.first(x).tanh()).sin()

class Own(Base):  # what a caller changes the module has, too
    def forward(self, x):
        return self.body(x), self.table["sizes"]

class Twice(Base):  # what a caller changes in one place is in the other, too
    def forward(self, x):
        sizes = [8]
        return self.body(x), sizes, sizes

class Anew(Base):
    def forward(self, x):
        return self.body(x), [8], {"sizes": [8]}

class Records(Base):
    def forward(self, x):
        x.requires_grad_()
        return (self.body(x),)

class Names(Base):
    def forward(self, x):
        x.seen = True
        return (self.body(x),)

def effect(model):
    x = torch.linspace(-1, 1, 32).view(4, 8)
    answer = model(x)
    twice = answer[-1] is answer[-2] if len(answer) > 1 else None
    return [answer[-1] is model.table["sizes"], twice, x.requires_grad, hasattr(x, "seen")]

rows = {}
with eagercache.enable((), modules="auto", on_miss="wait", choose="always", training=True):
    for kind in (Own, Twice, Anew, Records, Names):
        for gradients in (False, True):
            model = kind().train(gradients)
            with torch.set_grad_enabled(gradients):
                seen = [effect(model) for _ in range(6)]
            hits = sum(row.hits for part, row in manager.stats() if part is model)
            rows[f"{kind.__name__} {gradients}"] = [hits, seen, explain_module(model)[:1]]
report(rows=rows)
"""


def test_what_a_caller_can_tell_of_an_answer_or_an_argument_is_as_eager_has_it(cache: Path) -> None:
    rows = run_program(ANSWERS, cache, fills=True, timeout=500)["rows"]
    expected = {
        "Own": [True, False, False, False],
        "Twice": [False, True, False, False],
        "Anew": [False, False, False, False],
        "Records": [False, None, True, False],
        "Names": [False, None, False, True],
    }
    for name, (hits, seen, lines) in rows.items():
        kind = name.partition(" ")[0]
        assert all(row == expected[kind] for row in seen), (name, seen, lines)
        assert (hits > 0) == (kind == "Anew"), (name, lines)
    assert "it returns a list, which outlives the call" in str(rows["Own True"][2])
    assert "it returns an object that is reached twice" in str(rows["Twice False"][2])
    names = str(rows["Names True"][2])
    assert "it writes to its arguments, or changes more of a tensor than its values" in names


RETURN_TYPES = """
import torch, eagercache
from torch.utils import _pytree as pytree
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
torch.manual_seed(0)

class Ranks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x):
        y = self.dense(x).tanh() * 2
        return y.max(-1), {"best": y.topk(3)}, torch.var_mean(y, 0)

def same(mine, theirs):
    if isinstance(mine, torch.Tensor):
        return torch.allclose(mine, theirs, atol=1e-5)
    keys = list(mine) if isinstance(mine, dict) else range(len(mine))
    return type(mine) is type(theirs) and all(same(mine[key], theirs[key]) for key in keys)

def name():
    try:
        return pytree.treespec_dumps(pytree.tree_structure(torch.ones(2, 2).max(-1)))
    except NotImplementedError:
        return None

before = name()
model, x, right = Ranks(), torch.randn(8, 16), []
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for gradients in (False, False, False, True, True, True):
        with torch.set_grad_enabled(gradients):
            right.append(same(model(x), Ranks.forward(model, x)))
    (row,) = [row for part, row in manager.stats() if part is model]
hits = [row.hits, row.training_hits]
report(right=right, hits=hits, named=[before, name()], lines=explain_module(model))
"""


def test_an_answer_holds_what_operators_return(cache: Path) -> None:
    for _ in range(2):  # made here, and found
        seen = run_program(RETURN_TYPES, cache, timeout=300, fills=True)
        assert all(seen["right"]) and seen["hits"] == [4, 2], seen
        assert seen["named"][0] == seen["named"][1], seen  # the program's pytree is as it was
