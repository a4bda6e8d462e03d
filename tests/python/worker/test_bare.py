"""Bare kernels of this torch version's own text: lowered, compiled together, and compared.

This is what lets bare kernels be made at all with a torch version: every call here must get a
plan, and its kernel must pass the proof that the worker makes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import clean_environment, run_python
from test_calls import NONE, boolean, describe, integer, integers, number, tensor


def tensors(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "tensor_list", "elements": list(elements)}


CALLS = {
    "pointwise": describe("abs", tensor((8,))),
    "strided": describe("neg", tensor((16, 24), (1, 16), dtype="bfloat16")),
    "number": describe("mul.Tensor", tensor((7, 5)), tensor((), dtype="float64", wrapped=True)),
    "broadcast": describe("add.Tensor", tensor((4, 6)), tensor((6,)), integer(1)),
    "vector function": describe("exp", tensor((100,))),
    "reduction": describe("sum.dim_IntList", tensor((64, 96)), integers(-1), boolean(False), NONE),
    "to a scalar": describe("mean", tensor((512, 64)), NONE),
    "several outputs": describe(
        "native_layer_norm",
        tensor((64, 96)),
        integers(96),
        tensor((96,)),
        tensor((96,)),
        number(1e-5),
    ),
    "index output": describe("max.dim", tensor((12, 40)), integer(1), boolean(False)),
    "list": describe("cat", tensors(tensor((8, 6), (1, 8)), tensor((8, 10))), integer(1)),
    "stacked": describe("stack", tensors(tensor((9,)), tensor((9,)), tensor((9,))), integer(0)),
    "integers": describe("bitwise_and.Tensor", *(tensor((33,), dtype="int32"),) * 2),
    "logical": describe("gt.Tensor", tensor((5, 7)), tensor((5, 7))),
    "pooling": describe(
        "avg_pool2d",
        tensor((2, 3, 8, 8)),
        integers(2, 2),
        integers(2, 2),
        integers(0, 0),
        boolean(False),
        boolean(True),
        NONE,
    ),
}

TOOLS = """
import json, os, sys, tempfile
from pathlib import Path
from eagercache.worker.validation import validate
from eagercache.worker.validation.native import native_answers
from eagercache.base.load import core
from eagercache.calls.call import Call
from eagercache.worker.inductor.compile import Tools
from eagercache.base.toolchain import find_compiler, pick_isa

folder = Path(tempfile.mkdtemp())
(folder / "build").mkdir()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
tools = Tools(find_compiler(), pick_isa(core.host_cpu_features()), None)
"""

PROGRAM = (
    TOOLS
    + """
calls = {name: Call(text) for name, text in json.loads(sys.argv[1]).items()}
lowered, natives, result = {}, {}, {}
for name, call in calls.items():
    with call.state.applied():
        natives[name] = native_answers(call)
        place = folder / str(len(lowered))
        place.mkdir()
        lowered[name] = tools.lower(call, len(natives[name][0].outputs), place)
plans = {name: each.plan for name, each in lowered.items() if each.plan is not None}
library = tools.bare.build(list(plans.values()), folder)
for name, call in calls.items():
    if name not in plans:
        result[name] = "no plan: " + lowered[name].why_container
        continue
    operator = call.description["op"], call.description["overload"], "CPU"
    core.register(*operator)
    probe = core.Probe(*operator)
    with call.state.applied():
        validate.capture(call, probe, natives[name][0].sample.clone(), "always")
        strides = [output.stride() for output in natives[name][0].outputs]
        try:
            probe.load(str(library), plans[name].with_strides(strides).to_json())
            reduces = lowered[name].text.reduces
            result[name] = validate.prove(call, probe, natives[name], reduces=reduces).numerics
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    del probe
print(json.dumps(result))
"""
)

# As where a bare kernel does not do. The object has what the hook comes to for memory and handles.
CONTAINER = (
    TOOLS
    + """
call = Call(json.loads(sys.argv[1]))
operator = call.description["op"], call.description["overload"], "CPU"
with call.state.applied():
    natives = native_answers(call)
    lowered = tools.lower(call, len(natives[0].outputs), folder / "build", allow_bare=False)
    core.register(*operator)
    probe = core.Probe(*operator)
    validate.capture(call, probe, natives[0].sample.clone(), "always")
    probe.load(str(lowered.container))
    proof = validate.prove(call, probe, natives, reduces=lowered.text.reduces)
dynamic = lowered.container.read_bytes()
print(json.dumps([proof.numerics, b"eagercache_connect" in dynamic]))
"""
)


@pytest.fixture(scope="module")
def proofs() -> dict[str, str]:
    """What became of each call; one process, one translation unit."""
    done = run_python(PROGRAM, clean_environment(), json.dumps(CALLS))
    assert done.returncode == 0, done.stderr
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", CALLS)
def test_a_bare_kernel_equals_native(proofs: dict[str, str], name: str) -> None:
    assert proofs[name] in ("bitwise", "accurate")


def test_a_container_equals_native_and_comes_to_the_hook_for_its_outputs() -> None:
    done = run_python(CONTAINER, clean_environment(), json.dumps(CALLS["index output"]))
    assert done.returncode == 0, done.stderr
    numerics, connects = json.loads(done.stdout.splitlines()[-1])
    assert numerics in ("bitwise", "accurate")
    assert connects
