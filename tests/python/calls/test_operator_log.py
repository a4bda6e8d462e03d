"""Operator logs: the keys that are read are those that the calls have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from eagercache.calls import operator_log, trace
from eagercache.calls.log_descriptions import Reading

pytestmark = pytest.mark.once

# The same calls as a program makes them and as a log has them. They step aside for nothing.
CALLS = [
    ("torch.var(x, -1)", "aten.var.correction", "((T([6, 4], f32), [-1]), {'correction': 1})"),
    ("torch.softmax(x, -1)", "aten._softmax.default", "((T([6, 4], f32), -1, False), {})"),
    ("x + 1", "aten.add.Tensor", "((T([6, 4], f32), 1), {})"),
    ("x / 8.0", "aten.div.Tensor", "((T([6, 4], f32), 8.0), {})"),
    ("torch.cat([x, x], 1)", "aten.cat.default", "(([T([6, 4], f32), T([6, 4], f32)], 1), {})"),
    ("x.sum([0], True)", "aten.sum.SymInt", "((T([6, 4], f32), [0], True), {})"),
    ("x.mean(1)", "aten.mean.dim", "((T([6, 4], f32), [1]), {})"),
    ("x.to(torch.float64)", "aten._to_copy.default", "((T([6, 4], f32),), {'dtype': f64})"),
    ("x.t().clone()", "aten.clone.default", "((T([4, 6], f32, stride=(1, 4)),), {})"),
    (
        "x.t().clone(memory_format=torch.contiguous_format)",
        "aten.clone.default",
        "((T([4, 6], f32, stride=(1, 4)),), {'memory_format': torch.contiguous_format})",
    ),
    (
        "torch.nn.functional.avg_pool2d(i, 3)",
        "aten.avg_pool2d.default",
        "((T([2, 3, 9, 9], f32), [3, 3]), {})",
    ),
    ("x.clamp(0, None)", "aten.clamp.default", "((T([6, 4], f32), 0), {})"),
    ("x ** 2", "aten.pow.Tensor_Scalar", "((T([6, 4], f32), 2), {})"),
    (
        "torch.nn.functional.layer_norm(x, (4,), w, None)",
        "aten.native_layer_norm.default",
        "((T([6, 4], f32), [4], T([4], f32), None, 1e-05), {})",
    ),
    (
        "torch.where(x > 0, x, x)",
        "aten.where.self",
        "((T([6, 4], b8), T([6, 4], f32), T([6, 4], f32)), {})",
    ),
]


def log_of(calls: list[tuple[str, str]]) -> str:
    return "".join(f"Operator: {name}\ncnt: 1, {call}\n" for name, call in calls)


def test_a_log_gives_the_keys_of_the_calls_themselves(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(log_of([(name, call) for _, name, call in CALLS]))
    code = "\n".join(["    " + text for text, _, _ in CALLS])
    result = program(
        f"""
import torch, eagercache, json
from pathlib import Path
from eagercache.calls import operator_log
from eagercache.calls.log_descriptions import Reading
from eagercache.calls import trace
x, w, i = torch.ones(6, 4), torch.ones(4), torch.ones(2, 3, 9, 9)
with eagercache.record({str(tmp_path / "trace")!r}):
{code}
made, read = trace.Trace(), trace.Trace()
trace.read(Path({str(tmp_path / "trace")!r}), made)
operator_log.read(Path({str(log)!r}), Reading(), read)
report(made=sorted(made.calls), read=sorted(read.calls), problems=read.problems)
"""
    )
    assert result["problems"] == []
    assert len(result["read"]) == len(CALLS)
    # The comparison of `where` is recorded, too.
    missing = set(result["read"]) - set(result["made"])
    assert missing == set(), (missing, result["made"])


def read(tmp_path: Path, text: str, **reading: Any) -> trace.Trace:
    path = tmp_path / "log.txt"
    path.write_text(text)
    result = trace.Trace()
    operator_log.read(path, Reading(**reading), result)
    return result


def tensors(result: trace.Trace) -> list[list[Any]]:
    (call,) = result.calls.values()
    rows = []
    for argument in call.description["args"]:
        for one in argument.get("elements", [argument]):
            if one["kind"] == "tensor":
                rows.append([one["dtype"], one["device"], one["sizes"], one["strides"]])
    return rows


def test_half_precision_is_single_on_a_cpu_and_stays_on_a_gpu(tmp_path: Path) -> None:
    text = log_of([("aten.abs.default", "((T([4, 2], f16),), {})")])
    assert tensors(read(tmp_path, text)) == [["float32", "cpu", [4, 2], [2, 1]]]
    on_gpu = read(tmp_path, text, device="cuda:0")
    assert tensors(on_gpu) == [["float16", "cuda:0", [4, 2], [2, 1]]]
    assert next(iter(on_gpu.calls.values())).description["dispatch_key"] == "CUDA"


def test_scaling_divides_the_batch_of_every_tensor_that_has_it(tmp_path: Path) -> None:
    call = "((T([64, 8, 4], f32, stride=(32, 1, 8)), T([64, 8, 1], f32)), {})"
    scaled = read(tmp_path, log_of([("aten.add.Tensor", call)]), scale=10)
    assert [row[2:] for row in tensors(scaled)] == [
        [[7, 8, 4], [32, 1, 8]],
        [[7, 8, 1], [8, 1, 1]],
    ]
    # A bias has no batch, whatever its size is.
    call = "((T([64, 64], f32), T([64], f32)), {})"
    scaled = read(tmp_path, log_of([("aten.add.Tensor", call)]), scale=2)
    assert [row[2] for row in tensors(scaled)] == [[32, 64], [64]]
    # Where the batch is not the outermost in memory, what steps over it shrinks with it.
    call = "((T([64, 5], f32, stride=(1, 64)),), {})"
    scaled = read(tmp_path, log_of([("aten.abs.default", call)]), scale=2)
    assert [row[2:] for row in tensors(scaled)] == [[[32, 5], [1, 32]]]


def test_counts_are_kept_and_equal_calls_add_up(tmp_path: Path) -> None:
    text = (
        "Operator: aten.abs.default\ncnt: 12, ((T([4], f32),), {})\ncnt: 3, ((T([4], f16),), {})\n"
    )
    (call,) = read(tmp_path, text).calls.values()
    assert call.calls == 15 and call.name == "aten::abs"


def test_what_this_torch_does_not_have_is_left_out_and_said(tmp_path: Path) -> None:
    result = read(
        tmp_path,
        log_of(
            [
                ("aten.no_such_thing.default", "((T([4], f32),), {})"),
                ("aten.abs.default", "((T([4], f32), 7), {})"),
                ("aten.abs.default", "((T([4], f32),), {})"),
            ]
        ),
    )
    assert len(result.calls) == 1
    assert result.problems == [
        "log.txt: aten.no_such_thing.default: this torch has no such operator (1 lines)",
        "log.txt: aten.abs.default: no overload of this torch takes these arguments (1 lines)",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Operator: aten.abs.default\nsomething else\n",
        "Operator: aten.abs.default\ncnt: 1, (T([4], f32)\n",
        "Operator: aten.abs.default\ncnt: 1, ((__import__('os'),), {})\n",
        "Operator: aten.abs.default\ncnt: 1, ((torch.load,), {})\n",
        "Operator: aten.abs.default\ncnt: 1, ((T([4], f32, stride=(1, 1)),), {})\n",
        "cnt: 1, ((T([4], f32),), {})\n",
    ],
)
def test_a_line_that_is_none_of_a_log_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(trace.TraceError, match=r"log\.txt:[12]: "):
        read(tmp_path, text)


def test_a_description_reads_back_as_json(tmp_path: Path) -> None:
    (call,) = read(
        tmp_path, log_of([("aten.clamp.default", "((T([4], f32), -inf, 1.5), {})")])
    ).calls.values()
    again = json.loads(json.dumps(call.description))
    assert again["args"][1] == {
        "name": "min",
        "kind": "float",
        "value": "-inf",
        "bits": "0xfff0000000000000",
    }
