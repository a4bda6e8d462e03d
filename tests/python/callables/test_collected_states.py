"""Hidden states and attentions of transformers' models, which are collected by hooks that stay."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from conftest import run_program
from eagercache.callables.module_identity import identify
from eagercache.callables.module_transfer import pack, unpack
from eagercache.calls import capturing_hooks, known_hooks
from eagercache.modules import names

BEGIN = """
import copy
import torch, transformers, eagercache
from torch.utils import _pytree as pytree
from eagercache.modules.manager import explain_module
torch.set_num_threads(1)
torch.manual_seed(0)
transformers.logging.set_verbosity_error()

def llama():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval()

def numbers(model, tokens, **asked):
    with torch.no_grad():
        answer = model(input_ids=tokens, use_cache=False, **asked)
    leaves = pytree.tree_leaves(dict(answer))
    return list(answer.keys()), [leaf.clone() for leaf in leaves if leaf is not None]

def same(one, other):
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(one[1], other[1]))

def hits(model):
    return sum(row["hits"] for row in core.module_stats() if row["module"] is model)

from eagercache.base.load import core
model = llama()
tokens = [torch.randint(3, 48, (2, 8)) for _ in range(3)]
states = dict(output_hidden_states=True)
both = dict(output_hidden_states=True, output_attentions=True)
"""

WHOLE = (
    BEGIN
    + """
kinds = {"plain": {}, "states": states, "both": both, "one": dict(output_hidden_states=[-1])}
own = copy.deepcopy(model)
expected = {name: [numbers(own, t, **kind) for t in tokens] for name, kind in kinds.items()}
counted = []

eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
rows = []
for name in ("plain", "states", "both", "plain", "one", "states"):
    before = hits(model)
    right = [same(numbers(model, t, **kinds[name]), e) for t, e in zip(tokens, expected[name])]
    rows.append([name, right, hits(model) - before])

# A hook of the program's own is called, and keeps calls from kernels.
handle = model.model.layers[0].register_forward_hook(lambda *_: counted.append(1))
before = hits(model)
hooked = [same(numbers(model, t, **states), e) for t, e in zip(tokens, expected["states"])]
aside = hits(model) - before
said = explain_module(model)[0]
handle.remove()
again = [same(numbers(model, t, **states), e) for t, e in zip(tokens, expected["states"])]
report(
    rows=rows, hooked=hooked, counted=len(counted), aside=aside, said=said, again=again,
    after=hits(model) - before,
)
"""
)

# Parts alone, of a model whose forward no kernel answers. It collects from them now and then.
PARTS = (
    BEGIN
    + """
own = copy.deepcopy(model)
kinds = [{}, {}, {}, both, both, {}, {}, both]
expected = [numbers(own, tokens[0], **kind) for kind in kinds]
layer = type(model.model.layers[0])
eagercache.enable(ops=(), modules=(layer,), on_miss="wait", choose="always")
right = [same(numbers(model, tokens[0], **k), e) for k, e in zip(kinds, expected)]
report(right=right, hits=[hits(part) for part in model.model.layers])
"""
)


def test_a_model_with_the_hooks_has_kernels(tmp_path: Path) -> None:
    seen = run_program(WHOLE, tmp_path, fills=True)
    # The first call that asks for states puts the hooks there; a kernel is of what it leaves.
    for name, right, by_kernel in seen["rows"]:
        assert right == [True] * 3, seen
        assert by_kernel >= 1, (name, seen)
    assert [row[2] for row in seen["rows"][-1:]] == [3], seen
    assert seen["hooked"] == seen["again"] == [True] * 3
    assert seen["counted"] == 3 and seen["aside"] == 0, seen
    assert "hooks on model.layers.0 (__main__)" in seen["said"]
    assert seen["after"] == 3, seen


def test_parts_that_a_model_collects_from_are_not_left_out(tmp_path: Path) -> None:
    seen = run_program(PARTS, tmp_path, fills=True)
    assert seen["right"] == [True] * 8, seen
    assert all(seen["hits"]), seen


def _hooked() -> torch.nn.Module:
    from transformers.utils import output_capturing

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    for key, index in (("hidden_states", 0), ("attentions", 1)):
        output_capturing.install_output_capuring_hook(model[0], key, index)
    return model


def test_the_hooks_arrive_in_another_process() -> None:
    model = _hooked()
    made = unpack(pack(model, (torch.zeros(1, 2),), {})).module
    assert identify(made).text == identify(model).text
    hooks = list(made[0]._forward_hooks.values())
    assert known_hooks.are_known(made[0])
    assert [hook.__closure__ is not None for hook in hooks] == [True, True]


def test_what_the_hooks_collect_is_part_of_what_a_model_is() -> None:
    model = _hooked()
    before = identify(model).digest
    keys = list(model[0]._forward_hooks)
    model[0]._forward_hooks.move_to_end(keys[0])
    assert identify(model).digest != before
    model[0]._forward_hooks.move_to_end(keys[1])
    assert identify(model).digest == before
    del model[0]._forward_hooks[keys[1]]
    assert identify(model).digest != before


def test_other_hooks_are_none_of_them() -> None:
    model = _hooked()
    (hook, *_) = model[0]._forward_hooks.values()

    def other(*_: object) -> None:
        pass

    other.__module__ = hook.__module__
    assert capturing_hooks.is_capturing(hook)
    assert not capturing_hooks.is_capturing(other)
    assert not capturing_hooks.is_capturing(pickle.loads)
    assert names.hooks_of(model) == "hooks on 0, by which a model around it collects answers"
    model[0].register_forward_hook(other)
    assert not known_hooks.are_known(model[0])
    assert identify(model).hooked == frozenset()
    assert names.hooks_of(model) == f"hooks on 0 ({other.__module__})"
