"""What the frontend answers is short as text, a table in a notebook, and public by name."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import eagercache
import pytest
import torch
from eagercache.base import config
from eagercache.frontend import waiting
from eagercache.frontend.module_report import ModuleReport
from eagercache.frontend.report import KernelInfo, KernelList
from eagercache.frontend.tables import html_table
from eagercache.modules import gains
from eagercache.modules.stats import ModuleStats
from eagercache.runtime import choices
from torch import nn

pytestmark = pytest.mark.once


def info(**more: Any) -> KernelInfo:
    fields: dict[str, Any] = {
        "op": "aten::var",
        "overload": "correction",
        "dispatch_key": "CPU",
        "digest": "ab",
        "call": {"args": [{"kind": "tensor", "dtype": "float32", "sizes": [8, 4]}]},
        "decision": "kernel",
        "reason": "",
        "native_ns": 200.0,
        "kernel_ns": 100.0,
        "numerics": "accurate",
        "facts": {},
    }
    return KernelInfo(**{**fields, **more})


def test_kernels_are_a_short_list_and_a_table() -> None:
    rows = KernelList([info(), info(decision="native", kernel_ns=None, reason="<slow>")])
    assert repr(rows).splitlines() == [
        "eagercache: 2 verdicts (1 kernel, 1 native)",
        "  <aten::var.correction: kernel, 2.00 times as fast>",
        "  <aten::var.correction: native, <slow>>",
    ]
    html = rows._repr_html_()
    assert html.count("<tr>") == 3 and "float32[8x4]" in html
    assert "&lt;slow&gt;" in html and "<slow>" not in html
    assert repr(KernelList()) == "eagercache: 0 verdicts"
    assert "and 30 more" in repr(KernelList([info()] * 50))
    assert isinstance(eagercache.kernels(), list)


def test_stats_and_explanations_are_one_line_and_a_table(cache: Path) -> None:
    with eagercache.enable(["var.correction"], on_miss="native", cache_dir=cache):
        torch.var(torch.ones(4, 4), -1)
        shown = repr(eagercache.stats())
        explained = eagercache.explain(torch.var, torch.ones(4, 4), -1)
    assert shown.startswith("<eagercache: ") and shown.endswith(">") and "\n" not in shown
    assert "by kernels" in shown and len(shown) < 160
    assert "aten::var.correction" in eagercache.stats()._repr_html_()
    assert repr(explained).startswith("<aten::var.correction: ") and len(repr(explained)) < 300
    assert "<table>" in explained._repr_html_()


def test_modules_are_lines_and_a_table(cache: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    assert "no module of it was met" in repr(eagercache.explain_module(model))
    with eagercache.enable((), modules="auto", on_miss="native", cache_dir=cache):
        with torch.no_grad():
            model(torch.ones(2, 4))
        said = eagercache.explain_module(model)
    assert str(said) == "\n".join(said) and said[0].startswith("(root) (torch.nn.")
    assert said.rows[0][0] == "" and said.rows[0][1].hits == 0
    assert said._repr_html_().count("<tr>") == 1 + len(said)
    (root,) = said.tree
    assert (root.path, root.calls, root.hits, root.native_ns) == ("", 1, 0, None)
    assert "(root): Sequential, 0 of 1 call by kernel" in repr(said) and len(repr(root)) < 100


def module_stats(**more: Any) -> ModuleStats:
    fields = {"name": "m.Block", "hits": 0, "pending": 1, "native": 0, "aside_reasons": {}}
    return ModuleStats(**{**fields, "state": "watched", "reason": "", **more})


def test_modules_are_a_tree_with_times_and_seconds_saved() -> None:
    facts = {"native_ns": "3e6", "kernel_ns": "1e6"}
    gains.note_kernel("test-shown", False, "one", facts)
    report = ModuleReport(
        [
            ("", module_stats(state="refused", reason="<slow>")),
            ("layers.0", module_stats(hits=100, identity="test-shown")),
            ("layers.0.mlp", module_stats()),
            ("layers.1", module_stats(hits=50, identity="test-shown")),
        ]
    )
    (root,) = report.tree
    assert [child.path for child in root.children] == ["layers.0", "layers.1"]
    first = root.children[0]
    assert [child.path for child in first.children] == ["layers.0.mlp"]
    assert (first.native_ns, first.kernel_ns) == (3e6, 1e6)
    assert first.seconds_saved == pytest.approx(0.2) and root.seconds_saved == 0.0
    assert root.total_seconds_saved() == pytest.approx(0.3)
    assert repr(report).splitlines()[:3] == [
        "eagercache: 4 modules, 150 calls by kernels, 0.3 s saved",
        "  <(root): Block, 0 of 1 call by kernel, 0.3 s saved, 2 below>",
        "    <layers.0: Block, 100 of 101 calls by kernel, 3.00 times as fast, "
        "0.2 s saved, 1 below>",
    ]
    assert "&lt;slow&gt;" in report._repr_html_() and "3,000.00" in report._repr_html_()
    # Where the module that was asked about was not met, those below it are.
    parts = ModuleReport([("a.b", module_stats()), ("a.c", module_stats())])
    assert [info.path for info in parts.tree] == ["a.b", "a.c"]
    deep = ModuleReport([(f"layers.{i}", module_stats()) for i in range(30)])
    assert repr(deep).endswith("and 10 more") and str(deep).count("\n") == 29


def test_numbers_of_a_table_are_never_shown_as_nothing() -> None:
    row = [(0.0, 0.000769, 0.0949, 0.1, 12_345.678, -0.004, 12_345)]
    cells = re.findall(r">([^<>]+)</td>", html_table("t", ["n"] * 7, row))
    assert cells == ["0.00", "0.00077", "0.095", "0.10", "12,345.68", "-0.004", "12,345"]


def test_dir_is_what_is_public() -> None:
    assert dir(eagercache) == sorted(eagercache.__all__)
    assert all(hasattr(eagercache, name) for name in dir(eagercache))


def _type_hints(what: Any) -> dict[str, Any]:
    # What is imported for type checkers alone is of no interest here.
    module = vars(sys.modules[what.__module__])
    return get_type_hints(what, {**dict.fromkeys(_ONLY_FOR_TYPES, Any), **module})


_ONLY_FOR_TYPES = ("Executor", "Remote", "RemotePlan", "Run", "Progress", "Budget")


@pytest.mark.parametrize(
    ("what", "name", "allowed"),
    [
        (eagercache.enable, "on_miss", config.ON_MISS),
        (eagercache.enable, "choose", config.CHOOSE),
        (eagercache.enable, "numerics", config.NUMERICS),
        (eagercache.default_operators, "device", ("cpu", "cuda")),
        (eagercache.register, "dispatch_key", ("CPU", "CUDA")),
        (eagercache.warm_up, "search", (config.Search, type(None))),
        (eagercache.warm_up, "device", (config.Device, type(None))),
        (eagercache.KernelInfo, "decision", ("kernel", "native", "failed")),
        (eagercache.Explanation, "outcome", ("hit", "native", "aside", "miss")),
        (eagercache.ModuleInfo, "state", ("watched", "new", "refused")),
        (eagercache.Exported, "numerics", config.NUMERICS),
    ],
)
def test_choices_are_literal_types(what: Any, name: str, allowed: tuple[Any, ...]) -> None:
    assert get_args(_type_hints(what)[name]) == allowed


def test_types_of_devices_are_what_enable_takes() -> None:
    assert get_args(config.Device) == tuple(choices.DISPATCH_KEYS)
    assert get_args(config.DispatchKey) == tuple(choices.DISPATCH_KEYS.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"modules": 3}, "modules=3 is not 'auto', a module class, the name of one"),
        ({"modules": nn.ReLU()}, "for one model call eagercache.accelerate"),
        ({"modules": [nn.ReLU()]}, "for one model call eagercache.accelerate"),
        ({"devices": 3}, "devices: 3 is not one of 'cpu', 'cuda'"),
        ({"skip": 3}, "an operator is named by a string such as"),
        ({"ops": 3}, "an operator is named by a string such as"),
        ({"cache_dir": 3}, "cache_dir=3 is not the path of a directory"),
        ({"on_miss": "x"}, "on_miss='x' is not one of 'background', 'wait', 'native'"),
    ],
)
def test_bad_values_of_enable_are_named_with_the_remedy(options: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        eagercache.enable(**options)
    assert said in str(caught.value)


def test_other_functions_name_what_they_take() -> None:
    model: Any = "model"
    for function in (eagercache.accelerate, eagercache.explain_module):
        with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not 'model'; enable"):
            function(model)
    with pytest.raises(TypeError, match="use a number of seconds"):
        eagercache.wait(model)


class FakeService:
    compiles, failures = 3, 0

    def unanswered(self) -> list[tuple[dict[str, Any], float]]:
        names = ["aten::cat", "aten::cat", "aten::abs", "aten::sin", "aten::cos"]
        return [({"op": name, "overload": ""}, 1.0) for name in names]


def test_a_wait_says_what_it_waits_for_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(waiting.session, "services", lambda: [FakeService()])
    monkeypatch.setattr(waiting, "_QUIET_SECONDS", 0.0)
    text = waiting.waits_for(3, 72)
    assert text == "eagercache: waiting for 5 kernels, 3 done, 1:12: cat (2), abs, sin, 1 more"
    monkeypatch.setenv("COLUMNS", "60")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        with waiting._Line() as line:
            line.update()
            line.update()
        shown = "waiting for 5 kernels, 0 done, 0:00: cat (2)" in stream.getvalue()
        assert shown == stream.isatty()
        before = stream.getvalue().partition("…")  # a narrow terminal has one line of it, too
        assert bool(before[1]) == stream.isatty() and "\n" not in before[0]


def test_explain_names_the_rule_that_decides_calls_without_a_verdict(cache: Path) -> None:
    x = torch.ones(5, 7)
    with eagercache.enable(["var.correction"], on_miss="native", cache_dir=cache):
        explained = eagercache.explain(torch.var, x, -1)
        assert explained.outcome == "miss" and "on_miss='native'" in explained.reason
        eagercache.freeze()
        explained = eagercache.explain(torch.var, x, -1)
        assert explained.outcome == "native" and "freeze() holds" in explained.reason
        eagercache.disable()
        explained = eagercache.explain(torch.var, x, -1)
        assert "enable() switches them on" in explained.reason
