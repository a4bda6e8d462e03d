"""What torch.profiler and torch's structured trace show of kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

# Operators: one whose kernel answers, and one that is native's. `entries` are the store's.
OPERATORS = """
import json, torch, eagercache
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(1)
x = torch.randn(64, 32)
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
for _ in range(3):
    torch.var(x, -1)

def run(**options):
    with profile(activities=[ProfilerActivity.CPU], **options) as found:
        torch.var(x, -1)
        torch.exp(x)
    return found

hits = eagercache.stats().hits
found = run(record_shapes=True, profile_memory=True)
hits = eagercache.stats().hits - hits
found.export_chrome_trace("trace.json")
events = [
    dict(name=event.name, parent=event.cpu_parent.name if event.cpu_parent else None,
         memory=event.self_cpu_memory_usage)
    for event in found.events()
]
report(
    hits=hits,
    events=events,
    table=found.key_averages().table(max_name_column_width=80),
    trace=json.load(open("trace.json"))["traceEvents"],
    digests=[row.digest for row in eagercache.kernels()],
)
"""

# A listener to all threads, and calls of a thread that had hits before it came.
ALL_THREADS = """
import threading, torch, eagercache
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(1)
x = torch.randn(64, 32)
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
for _ in range(10):
    torch.var(x, -1)
config = _ExperimentalConfig(profile_all_threads=True)
ready, go = threading.Event(), threading.Event()

def calls():
    torch.var(x, -1)
    ready.set()
    go.wait()
    for _ in range(200):
        torch.var(x, -1)

thread = threading.Thread(target=calls)
thread.start()
ready.wait()
with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
    go.set()
    thread.join()
for _ in range(5):
    torch.var(x, -1)
names = [event.name for event in found.events()]
report(ours=sum(name.startswith("eagercache ") for name in names), all=names.count("aten::var"))
"""

MODULE = """
import json, torch, eagercache
from eagercache.modules.manager import manager
from eagercache.runtime.session import session
from torch import nn
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(1)

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
    def forward(self, x, weight=None):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Norm(), Norm()])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Whole(Net):
    pass

training = {training}
net, alone, x = {net}(), Norm(), torch.randn(8, 16)
eagercache.enable((), modules=[Norm, Whole], training=training, on_miss="wait", choose="always")

def call():
    with torch.set_grad_enabled(training):
        y = net(x)
        alone(x)
    if training:
        y.sum().backward()

for _ in range(4):
    call()
before = sum(row.hits for _, row in manager.stats())
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
    call()
hits = sum(row.hits for _, row in manager.stats()) - before
found.export_chrome_trace("trace.json")
with profile(activities=[ProfilerActivity.CPU]) as without_shapes:
    call()
report(
    hits=hits,
    trace=json.load(open("trace.json"))["traceEvents"],
    without_shapes=[event.kwinputs for event in without_shapes.events()],
    events=[
        dict(name=event.name, parent=event.cpu_parent.name if event.cpu_parent else None,
             shapes=event.input_shapes, sequence=event.sequence_nr, kwinputs=event.kwinputs)
        for event in found.events()
    ],
    keys=[row["key"] for row in session.store.entries() if row["kind"] == "kernel"],
)
"""

# A kernel that is found to be wrong, while torch writes a structured trace.
TRACED = """
import logging, os, torch, eagercache
from eagercache.base import structured_trace
from eagercache.base.load import core

torch.set_num_threads(1)
x = torch.randn(64, 32)
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
for _ in range(3):
    torch.var(x, -1)
from eagercache.runtime import compile_requests
compile_requests._put_aside("ab" * 32, "a kernel's answer differed from native's")
print(sorted(name for name in sys.modules if name.startswith("torch._dynamo"))[:1])
report(on=structured_trace.is_on(), digests=[row.digest for row in eagercache.kernels()])
"""


def _ours(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if "eagercache" in event["name"]]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the programs write their traces


@pytest.fixture
def profiled(cache: Path) -> dict[str, Any]:
    return run_program(OPERATORS, cache, fills=True)


def test_a_hit_has_an_event_below_its_operator(profiled: dict[str, Any]) -> None:
    assert profiled["hits"] == 1
    (ours,) = _ours(profiled["events"])
    digest = ours["name"].removeprefix("eagercache ")
    assert len(digest) == 12 and any(known.startswith(digest) for known in profiled["digests"])
    assert ours["parent"] == "aten::var"  # whose name stays
    assert not [e for e in profiled["events"] if e["parent"] == ours["name"]]
    exp = [event for event in profiled["events"] if event["name"] == "aten::exp"]
    assert len(exp) == 1  # native, and nothing of ours below it


def test_the_table_the_trace_and_the_memory_view_show_it(profiled: dict[str, Any]) -> None:
    (ours,) = _ours(profiled["events"])
    rows = profiled["table"].splitlines()
    assert sum(ours["name"] in row for row in rows) == 1
    assert sum("aten::var" in row for row in rows) == 1
    events = [event for event in profiled["trace"] if event.get("name") == ours["name"]]
    assert len(events) == 1 and events[0]["cat"] == "cpu_op"
    # `torch.var` with a dimension calls the overload that has the kernel.
    _, var = [event for event in profiled["trace"] if event.get("name") == "aten::var"]
    assert var["args"]["Input Dims"][0] == [64, 32]
    assert var["ts"] <= events[0]["ts"]
    assert events[0]["ts"] + events[0]["dur"] <= var["ts"] + var["dur"]
    assert ours["memory"] == 64 * 4  # the output, which the kernel's event allocates


def test_a_listener_to_all_threads_is_noticed_after_a_few_calls(cache: Path) -> None:
    said = run_program(ALL_THREADS, cache, fills=True)
    assert said["all"] == 200
    assert 200 - 64 <= said["ours"] <= 200


def _module_events(cache: Path, training: bool, net: str = "Net") -> dict[str, Any]:
    said = run_program(MODULE.format(training=training, net=net), cache, fills=True)
    for event in _ours(said["events"]):
        digest = event["name"].rpartition(" ")[2].rstrip("]")
        assert len(digest) == 12 and any(key.startswith(digest) for key in said["keys"])
    return said


def test_a_module_is_named_by_its_place_in_the_model(cache: Path) -> None:
    said = _module_events(cache, training=False)
    ours = _ours(said["events"])
    names = [event["name"].partition(" [eagercache ")[0] for event in ours]
    assert names == ["module: layers.0", "module: layers.1", "module: Norm"]
    assert said["hits"] == 3
    assert all(event["shapes"] == [[8, 16]] for event in ours)
    inside = [event for event in said["events"] if event["name"] == "aten::rsqrt"]
    assert not inside  # the forward's operators are in the kernel


def test_what_a_modules_kernel_takes_is_named_as_inductor_names_it(cache: Path) -> None:
    said = _module_events(cache, training=False)
    expected = {"arg0_1": "parameter scale, float32[16]", "arg1_1": "input 0, float32[8, 16]"}
    assert [event["kwinputs"] for event in _ours(said["events"])] == [expected] * 3
    in_trace = [event["args"] for event in said["trace"] if "eagercache" in event.get("name", "")]
    assert len(in_trace) == 3
    assert all(expected.items() <= arguments.items() for arguments in in_trace)
    assert not any(said["without_shapes"])


def test_tensors_of_submodules_are_named_by_their_place(cache: Path) -> None:
    whole, _ = _ours(_module_events(cache, training=False, net="Whole")["events"])
    assert sorted(whole["kwinputs"].values()) == [
        "input 0, float32[8, 16]",
        "parameter layers.0.scale, float32[16]",
        "parameter layers.1.scale, float32[16]",
    ]


def test_a_backward_by_a_kernel_is_an_event_of_its_own(cache: Path) -> None:
    said = _module_events(cache, training=True)
    # The others would keep more for their backward than eager does.
    assert said["hits"] == 1
    forward = [event for event in _ours(said["events"]) if "module: layers.1" in event["name"]]
    backward = [event for event in _ours(said["events"]) if "module: backward" in event["name"]]
    assert len(forward) == len(backward) == 1
    assert backward[0]["parent"] == "EagercacheModuleBackward"
    assert backward[0]["kwinputs"] == {
        "arg0_1": "kept for the backward, float32[16]",
        "arg1_1": "kept for the backward, float32[8, 16]",
        "arg2_1": "kept for the backward, float32[8, 1]",
        "arg3_1": "gradient of output 0, float32[8, 16]",
    }
    # By its number profilers find the backward of a forward.
    nodes = {
        event["sequence"]
        for event in said["events"]
        if "evaluate_function: EagercacheModuleBackward" in event["name"]
    }
    assert {event["sequence"] for event in forward} == nodes


def _artifacts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The JSON of our artifacts in a trace of torch's, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in folder.glob("*.log"):
        name, lines = "", []
        for line in [*file.read_text().splitlines(), "V end {}"]:
            if line.startswith("\t"):
                lines.append(line[1:])
                continue
            if name.startswith("eagercache_"):
                found.setdefault(name, []).append(json.loads("\n".join(lines)))
            head = json.loads(line[line.index("{") :])
            name, lines = head.get("artifact", {}).get("name", ""), []
    return found


def test_a_structured_trace_has_compiles_validations_and_what_was_put_aside(
    cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    said = run_program(TRACED, cache, TORCH_TRACE=str(folder))
    assert said["on"]
    found = _artifacts(folder)
    (compiled,) = found["eagercache_compile"]
    assert compiled["op"] == "aten::var.correction" and compiled["verdict"] == "kernel"
    assert compiled["digest"] in said["digests"] and "failure" not in compiled
    (validated,) = found["eagercache_validation"]
    assert validated["numerics"] in ("accurate", "bitwise")
    assert validated["native_ns"] > 0 and validated["kernel_ns"] > 0
    (aside,) = found["eagercache_quarantine"]
    assert aside["digest"] == "ab" * 32 and "differed" in aside["reason"]


def test_without_a_structured_trace_nothing_is_imported_or_written(cache: Path) -> None:
    said = run_program(TRACED, cache, fills=True)
    assert not said["on"] and "torch._dynamo" not in said["stdout"]
