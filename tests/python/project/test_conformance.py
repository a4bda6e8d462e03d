"""A small part of the conformance run, and faults planted for it to find.

`make conformance` runs all of PyTorch's operator database; here are a few operators of most risk.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance import runner, summary, units, untimed_worker
from conformance.ours import service_settings
from conformance.runner import State
from conftest import PACKAGE_ROOT, clean_environment
from eagercache.service.worker_process import worker_environment
from eagercache.worker.jobs import cuda_search

TESTS = Path(__file__).resolve().parent.parent.parent
OPERATORS = "roll,amax,where,index_select,softmax"  # one of each kind of risk
# Only of these: to count the samples of the whole database takes minutes.
CHOSEN = (
    *("--ops", OPERATORS, "--dtypes", "float32", "--stages", "first,forms", "--samples", "1"),
)


@pytest.fixture(scope="session")
def conformance_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The state of a run of a few operators, with the kernels that it compiled, and its totals."""
    folder = tmp_path_factory.mktemp("conformance")
    return folder, _run(folder, *CHOSEN)


def _environment() -> dict[str, str]:
    paths = [PACKAGE_ROOT, str(TESTS), str(TESTS / "python")]  # the last has `remade`
    return clean_environment(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")


def _run(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "conformance", "--state", str(folder), "--jobs", "1", "--json"),
            *arguments,
        ],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    totals: dict[str, Any] = json.loads(done.stdout)
    return totals


def test_operators_of_most_risk_equal_native(
    conformance_state: tuple[Path, dict[str, Any]],
) -> None:
    folder, totals = conformance_state
    said = (folder / "results.jsonl").read_text()
    assert (totals["disagreements"], totals["crashes"]) == (0, 0), said
    assert totals["operators_done"] == len(OPERATORS.split(","))
    assert totals["compiled_hits"] > 80
    assert totals["overloads_hit"] > 15


def test_a_second_run_has_nothing_left_to_do(
    conformance_state: tuple[Path, dict[str, Any]],
) -> None:
    folder, totals = conformance_state
    before = (folder / "results.jsonl").read_text()
    assert _run(folder, *CHOSEN) == totals
    assert (folder / "results.jsonl").read_text() == before


PLANTS = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from conformance.child import Child
from conformance.database import BackendCall
from conformance.ours import Ours, core
from eagercache.runtime import session
from remade import object_for

aten = torch.ops.aten
state = Path(sys.argv[1])
ours = Ours(state / "store", "cpu")
child = Child(ours, state)
store = session.session.store
x = torch.randn(6, 5)

def call(func, *args):
    return BackendCall(func, args, {})

def digest(call):
    with ours.recording() as rows, ours.answering():
        call.func(*call.args)
    return rows[0]["digest"]

def put(wrong, right):
    # The store's answer for `right` is the kernel of `wrong`.
    known = store.find(digest(wrong))
    assert known["kind"] == "kernel", known
    paths = object_for(digest(right), known, state / "store", state)
    store.remove(digest(right))
    kept = {k: known[k] for k in ("kind", "created", "facts", "cpu_features") if k in known}
    store.publish({**kept, "key": digest(right)}, paths)

def sees(*calls):
    result = child.check(calls)
    return [(one["label"], one["problems"][0], one["numbers"], one["entries"]) for one in
            result["disagreements"]]

ceil, floor = call(aten.ceil.default, x), call(aten.floor.default, x)
rolls = [call(aten.roll.default, x, [shift], [1]) for shift in (1, 2)]
relu, neg = call(aten.relu_.default, x), call(aten.neg.default, x)
found = {"nothing": sees(ceil, floor, *rolls, relu, neg)}
put(floor, ceil)
found["wrong kernel"] = sees(ceil)
put(*rolls)
found["missing key field"] = sees(*rolls)
library = torch.library.Library("aten", "IMPL")
library.impl("relu_", lambda x: x if core.answering() else aten.clamp_min_(x, 0), "CPU")
library.impl("neg", lambda x: x.view_as(x) if core.answering() else aten.mul(x, -1), "CPU")
found["missed effect"] = sees(relu)
found["aliasing"] = sees(neg)
power = child.check([call(aten.pow.Tensor_Scalar, x.double(), 2.5)])
found["denied"] = [list(power["outcomes"]["aten::pow.Tensor_Scalar"]), power["hits"]]
ours.close()
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run says of calls in which faults were planted, by fault."""
    state = tmp_path_factory.mktemp("planted")
    done = subprocess.run(
        [sys.executable, "-c", PLANTS, str(state)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.once
def test_without_a_planted_fault_nothing_is_found(planted: dict[str, Any]) -> None:
    assert planted["nothing"] == []


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "operator", "problem"),
    [
        ("wrong kernel", "aten::ceil", "element"),
        ("missing key field", "aten::roll", "element"),
        ("missed effect", "aten::relu_", "ends otherwise"),
        ("aliasing", "aten::neg", "aliasing"),
    ],
)
def test_a_planted_fault_is_found(
    planted: dict[str, Any], fault: str, operator: str, problem: str
) -> None:
    assert planted[fault]
    for label, text, _, _ in planted[fault]:
        assert label.startswith(operator)
        assert problem in text


@pytest.mark.once
def test_a_disagreement_can_be_looked_into_elsewhere(planted: dict[str, Any]) -> None:
    _, _, numbers, entries = planted["wrong kernel"][-1]
    given, native, here = (json.loads(numbers[name])[0] for name in ("given", "native", "here"))
    assert native == [[math.ceil(number) for number in row] for row in given]
    assert here == [[math.floor(number) for number in row] for row in given]
    assert [(one["op"], one["numerics"]) for one in entries] == [("aten::ceil", "bitwise")]


@pytest.mark.once
def test_a_denied_call_is_native(planted: dict[str, Any]) -> None:
    (outcome,), hits = planted["denied"]
    assert outcome.startswith("native: denied:")
    assert hits == 0


def test_units_come_worst_first_and_shards_hold_each_once() -> None:
    table = {"abs": {"float32": 3}, "roll": {"float32": 200, "bool": 6}, "sum": {"int64": 7}}
    every = units.all_units("cpu", table)
    assert every[0].op == "roll"
    assert [units.Unit.parse(unit.name) for unit in every] == every
    stages = [unit.stage for unit in every]
    assert stages.index("rest") > max(i for i, stage in enumerate(stages) if stage != "rest")
    shards = [units.select(every, shard=(index, 2)) for index in range(2)]
    assert sorted(shards[0] + shards[1], key=str) == sorted(every, key=str)
    assert {unit.op for unit in units.select(every, ["r*"])} == {"roll"}


def test_units_hold_every_sample_of_the_whole_dtypes_once() -> None:
    every = units.all_units("cpu", {"roll": {"float32": 200, "complex64": 9}, "abs": {"bool": 6}})
    chosen = units.select(every, ["roll"], ["float32"], ["first", "rest"])
    held = [sample for unit in chosen for sample in range(*unit.samples())]
    assert chosen[0].samples() == (0, units.FIRST_SAMPLES)
    assert held[:200] == list(range(200))
    assert chosen[-1].samples()[0] < 200
    assert not units.select(every, ["abs"], [], ["rest"])
    assert not units.select(every, [], ["complex64"], ["rest"])


def test_results_of_another_place_count_as_done(tmp_path: Path) -> None:
    here, there = State.open(tmp_path / "here"), State.open(tmp_path / "there")
    one, two = (units.Unit("cpu", op, "float32", "first") for op in ("roll", "sum"))
    there.add({"unit": one.name, "complete": True})
    there.add({"unit": two.name, "complete": True})
    here.add({"unit": two.name, "complete": False})
    both = State.open(tmp_path / "here", [tmp_path / "there"])
    assert both.done(one) and not both.done(two)  # what was run here is the later
    assert not here.done(one)


def test_units_with_failures_can_be_run_again(tmp_path: Path) -> None:
    state = State.open(tmp_path)
    fine: dict[str, Any] = {"complete": True, "disagreements": [], "dropped": 0, "outcomes": {}}
    killed = {"aten::abs": {"native: the compile worker was killed by signal N": 2}}
    native = {"aten::abs": {"native: no kernel of its own": 2}}
    wrong = {**fine, "disagreements": [{"op": "aten::abs"}]}
    for op, result in (
        ("fine", {**fine, "outcomes": native}),
        ("killed", {**fine, "outcomes": killed}),
        ("wrong", wrong),
    ):
        state.add({"unit": f"cpu/{op}/bool/first", **result})
    state.forget_failures()
    assert list(state.results) == ["cpu/fine/bool/first"]


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("cuda", "0")])
def test_workers_see_a_gpu_where_kernels_are_made_for_one(
    tmp_path: Path, device: str, seen: str
) -> None:
    settings = service_settings(tmp_path / "store", "text", device)
    assert worker_environment(settings, {})["CUDA_VISIBLE_DEVICES"] == seen


def test_a_kernel_for_a_gpu_that_is_not_timed_is_judged_and_no_other_form_is_looked_for() -> None:
    untimed = untimed_worker._untimed_on_gpu()
    assert untimed.facts()["kernel_device_ns"] == "1"
    assert not cuda_search.is_worth_it(untimed, 1 << 30, 3000.0)


def test_named_units_are_run_again_after_those_that_never_were(tmp_path: Path) -> None:
    old = State.open(tmp_path / "old")
    abs_, roll, sum_ = (units.Unit("cpu", op, "float32", "first") for op in ("abs", "roll", "sum"))
    for unit in (abs_, sum_):
        old.add({"unit": unit.name, "complete": True})
    state = State.open(tmp_path / "new", [old.folder])
    state.run_again([abs_.name])
    options = runner.Options("cpu", 1, None, None)
    assert runner.Run(state, [abs_, roll, sum_], options).todo == [roll, abs_]
    state.add({"unit": abs_.name, "complete": True})
    state = State.open(tmp_path / "new", [old.folder])
    state.run_again([abs_.name])
    assert runner.Run(state, [abs_, roll, sum_], options).todo == [roll]


def test_the_page_has_the_totals_of_each_torch_version(tmp_path: Path) -> None:
    tally: dict[str, Any] = {
        "samples": 3, "calls": 4, "comparisons": 50, "complete": True, "kernels": 2, "compiled": 2,
        "cpu_seconds": 1.0, "hits": 9, "outcomes": {"aten::abs": {"hit": 2, "native: slower": 1}},
        "hit_overloads": {"aten::abs": 9}, "unrepeatable": {}, "not_hooked": {},
        "disagreements": [], "dropped": 0,
    }  # fmt: skip
    wrong = {"op": "aten::roll", "problems": ["values: element 3"], "form": "sample"}
    runs = []
    for version, found in (("2.11.0", []), ("2.15.0", [wrong])):
        state = State.open(tmp_path / version)
        (state.folder / "about-cpu.json").write_text(f'{{"torch": "{version}", "hooked": 7}}')
        counts = {"asked": ["abs"], "counts": {"abs": {"bool": 3}}}
        (state.folder / "units-cpu.json").write_text(json.dumps(counts))
        state.add({"unit": "cpu/abs/bool/first", **tally, "disagreements": found})
        runs.append((state, runner.counted_units(state, "cpu")))
    programs = {
        "torch": "2.11.0", "date": "2026-01-01", "jobs": 2, "seed": 3, "findings": [], "crashes": 0,
        "totals": {"calls": 1234567, "programs": 9, "gradients": 1, "raised": 2, "judged": 3},
        "answered": {"hits": 3, "native": 1}, "pool": {"keys": 7, "kernels": 6},
    }  # fmt: skip
    page = summary.document(*runs[0], "cpu", runs[1:], [programs])
    assert "1,234,567 calls of 9 programs" in page and "75.0% of 4 calls" in page
    assert "| | 2.11.0 | 2.15.0 |" in page
    assert "| comparisons with native | 50 | 50 |" in page
    assert "| disagreements | 0 | 1 |" in page
    assert "element 3" in page
    assert "| first | bool | 1 | 0 | 1 | 0 |" in page
    alone = summary.document(*runs[0], "cpu")
    assert "| comparisons with native | 50 |\n" in alone
    assert "2.15" not in alone and "None among what was run." in alone


def test_full_files_are_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FULL_FILE", 100)
    state = State.open(tmp_path)
    for op in map(str, range(40)):
        state.add({"unit": f"cpu/{op}/bool/first", "complete": True})
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 200
    assert list(State.open(tmp_path).results) == list(state.results)
