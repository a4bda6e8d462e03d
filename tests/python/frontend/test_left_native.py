"""Operators that native always wins are not hooked by the next process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Program, run_program
from eagercache.runtime import left_native
from eagercache.runtime.session import Configuration

pytestmark = pytest.mark.once

FIRST = """
import eagercache, torch
x = torch.randn(8, 8)
eagercache.enable(["histc", "kthvalue"], on_miss="wait")
for _ in range(1100):
    torch.histc(x)
torch.histc(x[:4])
torch.kthvalue(x, 2)
report(decisions=sorted({(k.op, k.decision) for k in eagercache.kernels()}))
"""
# The draw is not the test's subject.
SECOND = """
import eagercache, torch
from eagercache.runtime import left_native
left_native._looks_again = lambda: {looks_again}
x = torch.randn(8, 8)
"""


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in whose list histc is, after one process that called it 1,100 times."""
    path = tmp_path_factory.mktemp("noted") / "cache"
    path.mkdir(mode=0o700)
    result = run_program(FIRST, path)
    assert ["aten::histc", "native"] in result["decisions"]
    return path


@pytest.fixture
def later(noted: Path) -> Program:
    """Later processes on that store."""

    def run(code: str, *, looks_again: bool = False) -> dict[str, object]:
        return run_program(SECOND.format(looks_again=looks_again) + code, noted)

    return run


def listed(store: Path) -> list[str]:
    (names,) = json.loads((store / "NATIVE").read_text())["native"].values()
    return list(names)


def test_an_operator_that_native_always_won_is_noted_and_no_other(noted: Path) -> None:
    assert listed(noted) == ["aten::histc@CPU"]  # kthvalue was called once


def test_the_next_process_leaves_it_alone_and_says_so(later: Program) -> None:
    result = later(
        """
eagercache.enable("all")
torch.histc(x)
hooked = {op[:2] for op in eagercache._C.active_operators()}
s = eagercache.stats()
report(left=s.left_native, counted="aten::histc" in s.operators, others=len(hooked),
       hooked=("aten::histc", "") in hooked, why=eagercache.explain("histc", x).reason)
"""
    )
    assert result["left"] == ["aten::histc"]
    assert not result["hooked"] and not result["counted"]
    assert result["others"] > 300
    assert "left alone" in result["why"]


def test_a_named_operator_is_hooked_all_the_same(later: Program) -> None:
    result = later(
        """
eagercache.enable(["histc"])
torch.histc(x)
row = eagercache.stats().operators["aten::histc"]
report(left=eagercache.stats().left_native, calls=row.native + row.misses + row.pending)
"""
    )
    assert result["left"] == [] and result["calls"] == 1


@pytest.mark.parametrize(
    "switch", ["choose='always'", "numerics='bitwise'"], ids=["always", "bitwise"]
)
def test_another_policy_has_a_list_of_its_own(later: Program, switch: str) -> None:
    result = later(
        f"""
eagercache.enable("all", on_miss="native", {switch})
report(left=eagercache.stats().left_native)
"""
    )
    assert result["left"] == []


def test_a_recording_sees_what_was_left_alone(later: Program, tmp_path: Path) -> None:
    result = later(
        f"""
eagercache.enable("all")
with eagercache.record({str(tmp_path / "trace")!r}):
    torch.histc(x)
report(trace=open({str(tmp_path / "trace")!r}).read())
"""
    )
    assert "aten::histc" in result["trace"]


def test_one_process_in_some_hooks_everything(later: Program, noted: Path) -> None:
    result = later(
        """
eagercache.enable("all", on_miss="wait")
torch.histc(x)
s = eagercache.stats()
report(left=s.left_native, calls=s.operators["aten::histc"].native)
""",
        looks_again=True,
    )
    assert result["left"] == [] and result["calls"] == 1
    assert listed(noted) == ["aten::histc@CPU"]  # one more call that native won changes nothing


@dataclass
class Core:
    """What `left_native` asks of the extension module, with these answers."""

    rows: list[dict[str, object]]
    decided: dict[str, str]

    def operator_stats(self) -> list[dict[str, object]]:
        return self.rows

    def verdicts(self) -> list[dict[str, str]]:
        return [
            {"op": op, "overload": "", "dispatch_key": "CPU", "decision": decision}
            for op, decision in self.decided.items()
        ]

    def frozen(self) -> bool:
        return False


def row(op: str, **counts: int) -> dict[str, object]:
    none = dict.fromkeys(("hits", "misses", "pending", "native", "aside"), 0)
    return {"op": op, "dispatch_key": "CPU", **none, **counts}


@pytest.mark.parametrize(
    ("counts", "decision", "expected"),
    [
        ({"native": 5000}, "native", ["old", "op"]),
        ({"native": 600, "aside": 600}, "native", ["old", "op"]),
        ({"native": 999}, "native", ["old"]),  # too few calls to tell
        ({"native": 5000, "pending": 400}, "native", ["old"]),  # too many without a verdict
        ({"native": 5000, "hits": 1}, "kernel", ["old"]),
        ({"native": 5000}, "failed", ["old"]),  # may be tried again
        ({"aside": 5000}, None, ["old"]),  # nothing is on record
    ],
)
def test_what_is_noted_of_an_operator(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    counts: dict[str, int],
    decision: str | None,
    expected: list[str],
) -> None:
    tmp_path.chmod(0o700)
    chosen = Configuration(on_miss="background", choose="faster", numerics="accurate")
    store = SimpleNamespace(root=str(tmp_path), read_only=False, environment_id="e" * 16)
    monkeypatch.setattr(left_native.session, "configuration", chosen)
    monkeypatch.setattr(left_native.session, "store", store)

    def note(rows: list[dict[str, object]], decided: dict[str, str]) -> list[str]:
        monkeypatch.setattr(left_native, "core", Core(rows, decided))
        left_native._note_calls()
        return [name.partition("@")[0] for name in listed(tmp_path)]

    both = [row("old", native=1000), row("op", native=1000)]
    assert note(both, {"old": "native", "op": "native"}) == ["old", "op"]
    kernel_now = [row("op", native=5000, hits=1)]
    assert note(kernel_now, {"op": "kernel"}) == ["old"]
    decided = {} if decision is None else {"op": decision}
    assert note([row("op", **counts)], decided) == expected
