"""What kernels saved, by operator and module, and what is not made yet: the arithmetic."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import eagercache
import pytest
from conftest import Program
from eagercache.frontend import gains
from eagercache.frontend.gains import Outcome, Unfinished, key_counts, saved_by_operator
from eagercache.frontend.remedies import remedy_of_short_programs
from eagercache.modules import gains as module_gains
from eagercache.modules.stats import ModuleStats

pytestmark = pytest.mark.once

VAR = ("aten::var", "CPU")


def verdict(
    digest: str, decision: str = "kernel", native_ns: float = 3000.0, kernel_ns: float = 1000.0
) -> Outcome:
    return digest, decision, native_ns, kernel_ns


def record(monkeypatch: pytest.MonkeyPatch, **hits: int) -> None:
    rows = [(json.dumps({"digest": digest}), count) for digest, count in hits.items()]
    monkeypatch.setattr("eagercache.base.load.core.recorded_calls", lambda: rows)


def test_hits_that_were_recorded_count_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, fast=10, slow=5, other=99)
    rows = [verdict("fast"), verdict("slow", kernel_ns=4000.0), verdict("x", decision="native")]
    saved, lost = saved_by_operator({VAR: rows}, {VAR: 15})[VAR]
    assert saved == pytest.approx(10 * 2e-6) and lost == pytest.approx(5 * 1e-6)


def test_other_hits_are_shared_by_the_kernels_of_their_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record(monkeypatch)
    rows = [verdict("fast"), verdict("slow", kernel_ns=4000.0), verdict("untimed", kernel_ns=0.0)]
    saved, lost = saved_by_operator({VAR: rows}, {VAR: 20})[VAR]
    assert saved == pytest.approx(10 * 2e-6) and lost == pytest.approx(10 * 1e-6)
    assert saved_by_operator({VAR: [verdict("n", decision="native")]}, {VAR: 20}) == {}


def test_what_was_cut_off_is_not_yet_and_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"op": "aten::var", "overload": "", "dispatch_key": "CPU", "digest": "open"}
    module = {"kind": "module", "op": "torch.nn.Linear", "digest": "m", "dispatch_key": "CPU"}
    service = SimpleNamespace(
        unfinished=lambda: [call, module], compiles=1, failures=0, remote_counts=lambda: {}
    )
    monkeypatch.setattr(gains.session, "services", lambda: [service])
    found = Unfinished.now()
    assert found.operators == {VAR: 1} and found.modules == {"torch.nn.Linear": 1}
    rows = [verdict("a"), verdict("open", decision="failed"), verdict("b", decision="failed")]
    assert key_counts(rows, found) == {"kernel": 1, "not yet": 1, "failed": 1}
    stats = eagercache.stats()
    assert stats.keys["not yet"] == stats.not_yet == 1
    assert stats.remedy.startswith("1 kernel is not made yet") and "record TRACE" in stats.remedy


def test_modules_count_what_a_call_saved_when_it_was_measured() -> None:
    facts = {"native_ns": "3e6", "kernel_ns": "1e6"}
    module_gains.note_kernel("test-gains", False, "one", facts)
    module_gains.note_kernel("test-gains", False, "one", facts)  # of another module alike
    module_gains.note_kernel("test-gains", False, "two", {**facts, "kernel_ns": "2e6"})
    module_gains.note_kernel("test-gains", True, "three", {**facts, "kernel_ns": "4e6"})
    module_gains.note_kernel("test-gains", True, "four", {})
    row = ModuleStats("M", 12, 0, 0, {}, "watched", "", training_hits=2, identity="test-gains")
    assert module_gains.seconds_saved(row) == pytest.approx(10 * 1.5e-3 - 2 * 1e-3)
    assert module_gains.seconds_saved(ModuleStats("M", 12, 0, 0, {}, "watched", "")) == 0.0


def test_the_remedy_names_commands_where_there_is_something_to_make() -> None:
    assert remedy_of_short_programs(0) == remedy_of_short_programs(0, running=True) == ""
    said = remedy_of_short_programs(1, "train.py")
    assert said.startswith("1 kernel was not made yet")
    assert "`eagercache record TRACE -- train.py`" in said and "`eagercache warm TRACE`" in said


def events_of_stats(monkeypatch: pytest.MonkeyPatch, keys: int) -> int:
    """How often Python calls a function, its own or of C, while it counts so many keys."""
    decisions = ("kernel", "native", "failed")
    rows = [verdict(f"{n:064x}", decisions[n % 3]) for n in range(keys)]
    recorded = [(json.dumps({"digest": f"{n:064x}", "args": [n]}), 7) for n in range(keys)]
    monkeypatch.setattr("eagercache.base.load.core.recorded_calls", lambda: recorded)
    all_rows = [("aten::var", "", "CPU", rows)]
    monkeypatch.setattr("eagercache.base.load.core.outcomes", lambda: all_rows)
    events = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal events
        events += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        eagercache.stats()
    finally:
        sys.setprofile(None)
    return events


def test_counters_cost_few_calls_a_key_and_read_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("the texts and facts of all keys were copied")

    monkeypatch.setattr("eagercache.base.load.core.verdicts", refuse)
    eagercache.stats()
    few, many = (events_of_stats(monkeypatch, keys) for keys in (100, 1100))
    assert (many - few) / 1000 <= 12


OUTCOMES = """
import eagercache, torch
from eagercache.base.load import core
eagercache.enable(["tanh", "abs"], choose="always", on_miss="wait")
for size in (5, 6, 7):
    torch.tanh(torch.randn(size))
torch.abs(torch.randn(3, 4))
long = sorted((r["op"], r["overload"], r["dispatch_key"], r["digest"], r["decision"],
               float(r["facts"].get("native_ns", 0)), float(r["facts"].get("kernel_ns", 0)))
              for r in core.verdicts())
short = sorted((op, overload, key, *one) for op, overload, key, rows in core.outcomes()
               for one in rows)
stats = eagercache.stats()
report(same=long == short, count=len(short), keys=stats.keys, timed=sum(r[5] > 0 for r in short))
"""


def test_what_counters_are_made_of_is_what_kernels_say(program: Program) -> None:
    seen = program(OUTCOMES, fills=True)
    assert seen["same"] and seen["count"] >= 2 and seen["timed"] >= 1
    assert sum(seen["keys"].values()) == seen["count"]
