"""Modules with their weights: export, calls, constants, under load. Files: test_deploy_files.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deploy_zoo
import eagercache
import pytest
import torch
from deploy_zoo import ONES, Deployed, answer_of, refusal
from eagercache import _C, DeployedModule


@pytest.fixture
def steps(deployed: Deployed) -> DeployedModule:
    """A module whose answer says of which version its weights are."""
    return deployed.load("steps", runners=4)


# ---- export --------------------------------------------------------------------------------------


def test_exports_say_what_they_made(deployed: Deployed) -> None:
    rows = deployed.rows
    assert rows["steps"]["constants"] == 5
    assert rows["steps"]["folded"] == 1
    assert {3, 16, 33} <= set(rows["steps"]["proved"])
    assert rows["mixed"]["folded"] >= 2, "the weights that autocast casts"
    assert rows["tied"]["proved"] == []
    for name in ("steps", "tied", "mixed"):
        assert rows[name]["bytes"] == (deployed.folder / name).stat().st_size
    assert not [name for name in deployed.left if "part" in name or name == "refused"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("noisy", ["Noisy cannot be deployed", "random"]),
        ("name", ["it has no input y; it has x"]),
        ("dimension", ["another program for each of the sizes"]),
        ("twice", ["at least 2"]),
        ("key", ["own.pub", "no private key"]),
    ],
)
def test_what_cannot_be_exported_is_one_clear_error(
    deployed: Deployed, name: str, texts: list[str]
) -> None:
    _, message = deployed.rows["refused"][name]
    assert "\n" not in message
    for text in texts:
        assert text in message


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"verify_weights": True}])
def test_answers_are_the_modules(deployed: Deployed, options: dict[str, Any]) -> None:
    model = deploy_zoo.Tied().eval()
    model.load_state_dict(torch.load(deployed.folder / "tied.pt"))
    module = deployed.load("tied", **options)
    args, kwargs = deploy_zoo.tied_call()
    with torch.no_grad():
        expected = model(*args, **kwargs)
    answer = module(*args, **kwargs)
    torch.testing.assert_close(answer, expected)
    assert isinstance(answer["hidden"], tuple)
    assert answer["hidden"][1] is None
    assert not answer["logits"].requires_grad


def test_the_casts_of_autocast_are_part_of_it(deployed: Deployed) -> None:
    model = deploy_zoo.Mixed().eval()
    model.load_state_dict(torch.load(deployed.folder / "mixed.pt"))
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)
    module = deployed.load("mixed")
    answer = module(x)
    assert answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer, expected)
    folded = [c for c in module.constants if c.kind == "folded"]
    assert {c.dtype for c in folded} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        moved = model(x)
    module.update_constants(model.state_dict(), whole=True)
    torch.testing.assert_close(module(x), moved)


def test_open_sizes_take_any_and_others_are_refused(
    deployed: Deployed, steps: DeployedModule
) -> None:
    for size in (2, 3, 31, 257):
        answer = steps(torch.ones(size, 8))
        assert answer.shape == (size, 4)
        assert set(answer.flatten().tolist()) == {deploy_zoo.Steps.answer(1.0)}
    with refusal("invalid_argument", "the input x", "[2, 7]"):
        steps(torch.ones(2, 7))
    with refusal("invalid_argument", "does not hold for the open sizes [1]"):
        steps(torch.ones(1, 8))


def test_other_strides_are_copied(steps: DeployedModule) -> None:
    x = torch.randn(8, 6).t()
    assert not x.is_contiguous()
    assert torch.equal(steps(x), steps(x.contiguous()))
    assert torch.equal(steps(torch.ones(1, 8).expand(4, 8)), steps(torch.ones(4, 8)))


def test_arguments_that_do_not_fit_are_one_clear_error(deployed: Deployed) -> None:
    module = deployed.load("tied")
    (ids, parts), kwargs = deploy_zoo.tied_call()
    module(ids, parts, **kwargs)
    with refusal("invalid_argument", "structure"):
        module(ids, parts)
    with refusal("invalid_argument", "structure"):
        module(ids, parts[0], **kwargs)
    with refusal("invalid_argument", "0.25", "0.5"):
        module(ids, parts, scale=0.25)
    with refusal("invalid_argument", "the input ids is a str"):
        module("x", parts, **kwargs)
    with refusal("invalid_argument", "the input ids", "Int", "Long"):
        module(ids.int(), parts, **kwargs)
    with refusal("invalid_argument", "the input ids has an index outside of [0, 16)"):
        module(ids + 1, parts, **kwargs)
    with refusal("invalid_argument", "takes 3 tensors, not 1"):
        module.run([ids])
    with refusal("invalid_argument", "the input parts.1", "no plain tensor"):
        module.run([ids, parts[0], parts[1].to_sparse()])
    with pytest.raises(TypeError, match="tensor"):
        module.run([1, 2, 3])  # type: ignore[list-item]


def test_gradients_and_autocast_of_the_caller_change_nothing(steps: DeployedModule) -> None:
    x = torch.ones(2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        answer = steps(x)
    assert answer.dtype == torch.float32
    assert not answer.requires_grad
    with torch.inference_mode():
        assert torch.equal(steps(ONES), answer)
    with refusal("unsupported", "mode"):
        torch.func.vmap(lambda row: steps(row.expand(2, 8)))(torch.ones(3, 8))


def test_its_own_operators_may_be_hooked(deployed: Deployed, cache: Path) -> None:
    before = deployed.load("steps")(ONES)
    with eagercache.enable(on_miss="native", cache_dir=cache):
        assert torch.equal(deployed.load("steps")(ONES), before)


# ---- what it says of itself ----------------------------------------------------------------------


def test_names_specs_and_facts(deployed: Deployed) -> None:
    module = deployed.load("tied")
    assert module.input_names == ["ids", "parts.0", "parts.1"]
    assert module.output_names == ["logits", "hidden.0"]
    assert [info.sizes for info in module.inputs] == [(1, 4), (1, 4, 8), (8,)]
    assert module.outputs[0].dtype == torch.float32
    in_spec, out_spec = map(json.loads, module.call_spec)
    assert [leaf.get("tensor") for leaf in in_spec["leaves"]] == [0, 1, 2, None]
    assert in_spec["leaves"][3] == {"value": 0.5}
    assert out_spec["leaves"][-1] == {"value": None}
    assert module.facts["module"].endswith("Tied")
    assert module.facts["numerics"] in ("accurate", "bitwise")
    assert module.facts["threads"] == "1"
    assert module.signer == _C.public_key(str(deployed.folder / "own.pub"))
    assert "ids, parts.0, parts.1 -> logits, hidden.0" in repr(module)
    steps = deployed.load("steps")
    assert steps.inputs[0].sizes == (None, 8)
    assert steps.output_names == ["output"]


def test_constants_are_listed_by_name(deployed: Deployed) -> None:
    constants = {c.name: c for c in deployed.load("tied").constants}
    embed = constants["embed.weight"]
    assert embed.aliases == ("head.weight",)
    assert (embed.kind, embed.dtype, embed.sizes) == ("parameter", torch.float32, (16, 8))
    assert embed.bytes == 16 * 8 * 4
    assert constants["order"].kind == "buffer"
    assert constants["order"].dtype == torch.int64
    steps = deployed.load("steps").constants
    assert sorted(c.kind for c in steps) == ["buffer", "folded", *["parameter"] * 3]
    assert steps[-1].kind == "folded"


# ---- constants -----------------------------------------------------------------------------------


def test_constants_come_back_as_copies(deployed: Deployed) -> None:
    module = deployed.load("tied")
    stored = torch.load(deployed.folder / "tied.pt")
    values = module.constant_values()
    assert values.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(values[name], value)
    args, kwargs = deploy_zoo.tied_call()
    before = module(*args, **kwargs)["logits"]
    values["embed.weight"].zero_()
    assert torch.equal(module(*args, **kwargs)["logits"], before)


def test_the_active_set_is_updated_and_folded_at_once(steps: DeployedModule) -> None:
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)
    assert steps.version == 1
    steps.update_constants(deploy_zoo.Steps.state(3.0), whole=True)
    assert answer_of(steps) == deploy_zoo.Steps.answer(3.0)
    assert steps.version == 2
    assert steps.inactive_version is None
    given = torch.full((4,), 5.0)
    steps.update_constants({"shift": given})
    given.zero_()
    assert answer_of(steps) == (8 * 3 + 3 + 5 + 3) * 3, "the tensor was copied"


def test_the_inactive_set_answers_once_it_is_swapped_in(steps: DeployedModule) -> None:
    with refusal("not_found", "no inactive constants"):
        steps.swap_constants()
    with refusal("not_found", "no inactive constants"):
        steps.constant_values(inactive=True)
    state = deploy_zoo.Steps.state(2.0)
    del state["scale"]
    steps.update_constants(state, inactive=True)
    steps.update_constants({"scale": torch.full((4,), 2.0)}, inactive=True)
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)
    assert steps.constant_values(inactive=True)["scale"].tolist() == [2.0] * 4
    assert steps.constant_values()["scale"].tolist() == [1.0] * 4
    assert steps.inactive_version == 3
    steps.swap_constants()
    assert answer_of(steps) == deploy_zoo.Steps.answer(2.0)
    assert (steps.version, steps.inactive_version) == (3, 1)
    steps.swap_constants()
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)
    steps.drop_inactive_constants()
    assert steps.inactive_version is None
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)


def test_kept_tensors_are_read_where_they_are_and_folded_when_asked(steps: DeployedModule) -> None:
    state = deploy_zoo.Steps.state(1.0)
    steps.update_constants(state, inactive=True, copy=False)
    steps.fold_constants(inactive=True)
    steps.swap_constants()
    for value in state.values():
        value.fill_(2.0)
    assert answer_of(steps) == (8 * 2 + 2 + 1 + 1) * 2, "folded values are the old ones"
    steps.fold_constants()
    assert answer_of(steps) == deploy_zoo.Steps.answer(2.0)
    with refusal("invalid_argument", "first.weight", "strides"):
        steps.update_constants({"first.weight": torch.ones(8, 4).t()}, copy=False)
    steps.update_constants({"first.weight": torch.full((8, 4), 2.0).t()})
    assert answer_of(steps) == deploy_zoo.Steps.answer(2.0)


def test_a_wrong_update_changes_nothing(deployed: Deployed, steps: DeployedModule) -> None:
    good = deploy_zoo.Steps.state(7.0)
    for inactive in (False, True):
        for values, texts in [
            ({**good, "nothing": torch.ones(1)}, ["there is no constant nothing"]),
            ({**good, "scale": torch.ones(5)}, ["scale", "[5]", "[4]"]),
            ({**good, "shift": torch.ones(4).double()}, ["shift", "Double", "Float"]),
            ({**good, "folded.0": torch.ones(4)}, ["folded.0 is folded"]),
            ({**good, "scale": torch.ones(4).to_sparse()}, ["scale", "no plain tensor"]),
        ]:
            with refusal("invalid_argument", *texts):
                steps.update_constants(values, inactive=inactive)
    with refusal("invalid_argument", "first.bias was not given"):
        steps.update_constants({k: v for k, v in good.items() if k != "first.bias"}, whole=True)
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)
    assert steps.version == 1
    assert steps.inactive_version is None
    tied = deployed.load("tied")
    with refusal("invalid_argument", "order has an index outside of [0, 4)"):
        tied.update_constants({"order": torch.tensor([0, 1, 2, 4])})
    with refusal("invalid_argument", "other names"):
        tied.update_constants(
            {"embed.weight": torch.zeros(16, 8), "head.weight": torch.ones(16, 8)}
        )
    tied.update_constants({"head.weight": torch.zeros(16, 8)})
    args, kwargs = deploy_zoo.tied_call()
    assert tied(*args, **kwargs)["logits"].abs().max() == 0


# ---- under load ----------------------------------------------------------------------------------


class Requests:
    """Threads that ask a module again and again."""

    def __init__(self, ask: Callable[[], None], threads: int = 4) -> None:
        self.errors: list[BaseException] = []
        self.count = 0
        self._stop = threading.Event()
        self._ask = ask
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._ask()
                self.count += 1
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors


@pytest.mark.parametrize("how", ["swap", "active"])
def test_every_answer_is_of_one_whole_version_over_1000_updates(
    steps: DeployedModule, how: str
) -> None:
    """Of version n all constants are n mod 61 + 1, so that no mixture answers as one of them."""
    value_of = {1: 1.0}
    seen: set[int] = set()

    def ask() -> None:
        (output,), version = steps.run_versioned([ONES])
        expected = deploy_zoo.Steps.answer(value_of[version])
        assert set(output.flatten().tolist()) == {expected}, version
        seen.add(version)

    rounds, met = 1000, 0
    with Requests(ask) as requests:
        for n in range(rounds):
            version = max(value_of) + 1
            value = float(version % 61 + 1)
            value_of[version] = value
            state = deploy_zoo.Steps.state(value)
            if how == "active":
                steps.update_constants(state, whole=True)
            else:
                steps.update_constants(state, inactive=True, whole=True)
                if n % 3 == 0:
                    steps.fold_constants(inactive=True)
                steps.swap_constants()
            assert steps.version == version
            while n % 20 == 0 and requests.count == met:
                time.sleep(0.001)
            met = requests.count
        before = requests.count
        while requests.count < before + 8:
            time.sleep(0.001)
    assert steps.version == rounds + 1
    assert len(seen) > 10, "requests and updates did not run at the same time"
    assert steps.wait(10)


def test_requests_wait_for_a_runner_and_not_for_others(deployed: Deployed) -> None:
    module = deployed.load("steps", runners=1)
    assert module.runners == 1
    assert module.is_ready()
    assert module.wait_until_ready(0)
    big = torch.ones(200_000, 8)
    busy = 0
    with Requests(lambda: [module.run([big])], threads=2):
        deadline = time.monotonic() + 60
        while busy == 0 and time.monotonic() < deadline:
            if module.try_run([ONES]) is None:
                busy += 1
                alone = module.run_single_threaded([ONES])[0]
                assert set(alone.flatten().tolist()) == {deploy_zoo.Steps.answer(1.0)}
        while module.is_ready() and time.monotonic() < deadline:
            pass
    assert busy, "two threads and one runner, and it was always free"
    assert module.wait(10)
    assert module.is_ready()
    (answer,) = module.try_run([ONES]) or [None]
    assert answer is not None


def test_modules_of_one_artifact_have_weights_of_their_own(deployed: Deployed) -> None:
    modules = [deployed.load("steps") for _ in range(3)]
    for index, module in enumerate(modules):
        module.update_constants(deploy_zoo.Steps.state(index + 1.0))
    for _ in range(2):
        for index, module in enumerate(modules):
            assert answer_of(module) == deploy_zoo.Steps.answer(index + 1.0)
