"""Operators made of Python functions by `eagercache.op`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

FUTURE = "from __future__ import annotations\n"
IMPORT = "from fused_functions import"


def _operators() -> str:
    """The functions and their calls as one text, without imports of files and of __future__."""
    zoo = Path(__file__).parents[1] / "zoos" / "operator_zoo.py"
    lines = zoo.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "EXAMPLES" not in line and not line.startswith(IMPORT)]
    functions = zoo.parents[3] / "examples" / "fused_functions.py"
    return (functions.read_text() + "".join(kept)).replace(FUTURE, "")


# Before the programs, since it is changed in some. A program has one statement of __future__.
OPERATORS = _operators()


@pytest.fixture(scope="session")
def operator_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with kernels for `calls()`, forward and backward."""
    path = tmp_path_factory.mktemp("operators") / "cache"
    path.mkdir(mode=0o700)
    seen = run_program(
        OPERATORS
        + """
eagercache.enable((), on_miss="wait", choose="always")
for function, args in calls():
    function(*[a.detach() for a in args])
    function(*[a.detach() for a in args])
    gradients(function, args)
report(kernels={k.op: [k.decision, k.reason, k.facts.get("form", "")]
                for k in eagercache.kernels()})
""",
        path,
        timeout=600,
        fills=True,
    )
    kernels = seen["kernels"]
    assert len(kernels) == 10
    # Its text calls PyTorch's own scatter.
    assert kernels.pop("demo::z_loss_backward")[::2] == ["kernel", "container"]
    assert all(row == ["kernel", row[1], "bare"] for row in kernels.values()), kernels
    yield path


@pytest.fixture
def with_operators(operator_cache: Path) -> Callable[..., dict[str, Any]]:
    """Programs on that store: nothing is compiled."""

    def run(code: str, head: str = OPERATORS, **variables: Any) -> dict[str, Any]:
        enable = "eagercache.enable((), on_miss='native', choose='always')\n"
        return run_program(head + enable + code, operator_cache, **variables)

    return run


def test_one_kernel_answers_forward_and_one_backward(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    result = with_operators(
        """
wrong = []
for function, args in calls():
    plain = [a.detach() for a in args]
    if not close(outputs(function(*plain)), outputs(function.function(*plain))):
        wrong.append(function.name)
    if not close(gradients(function, args), gradients(function.function, args)):
        wrong.append(function.name + " backward")
stats = eagercache.stats()
x = tensors((16, 32), (16, 32))
report(wrong=wrong, native=stats.native, misses=stats.misses,
       hits={name: row.hits for name, row in stats.operators.items() if row.hits},
       node=type(swiglu(*x).grad_fn).__name__ + " " + swiglu(*x).grad_fn.name(),
       call=str(eagercache.explain(swiglu, *[t.detach() for t in x])))
"""
    )
    assert not result["wrong"]
    assert (result["native"], result["misses"]) == (0, 0)
    names = ["rms_norm_gate", "rotary", "swiglu", "lstm_gates", "z_loss"]
    assert result["hits"] == {
        **{f"demo::{name}": 2 for name in names},
        **{f"demo::{name}_backward": 1 for name in names},
    }
    assert "demo::swiglu_backward" in result["node"]
    assert result["call"] == "demo::swiglu: hit, a kernel answers"


def test_an_index_out_of_range_raises_as_the_function_does(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    result = with_operators(
        """
logits, target = [a.detach() for a in list(calls())[-1][1]]
z_loss(logits, target)
errors = []
for wrong in (32, -1, 2**40):
    bad = target.clone()
    bad[3] = wrong
    for function in (z_loss, z_loss.function):
        try:
            function(logits, bad)
        except RuntimeError as error:
            errors.append(str(error))
row = eagercache.stats().operators["demo::z_loss"]
after = close([z_loss(logits, target)], [z_loss.function(logits, target)])
report(errors=errors, hits=row.hits, native=row.native, after=after)
"""
    )
    assert len(result["errors"]) == 6
    assert result["errors"][::2] == result["errors"][1::2]
    assert "out of bounds" in result["errors"][0]
    assert (result["hits"], result["native"], result["after"]) == (1, 3, True)


def test_a_changed_function_never_meets_a_kernel_of_the_one_before(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    look = """
rows = {}
for function, args in calls(needs=False):
    before = eagercache.stats().hits
    right = close(outputs(function(*args)), outputs(function.function(*args)))
    rows[function.name] = [eagercache.stats().hits - before, right]
report(rows=rows)
"""
    changed = OPERATORS.replace("return F.silu(x) * y", "return F.silu(x) * y * 2")
    changed = changed.replace("mean(-1, keepdim=True) + eps", "mean(-1, keepdim=True) - eps")
    rows = with_operators(look, head=changed)["rows"]
    assert rows["demo::swiglu"] == [0, True], "its own code"
    assert rows["demo::rms_norm_gate"] == [0, True], "that of a function that it calls"
    assert rows["demo::rotary"] == [1, True], "the others have not changed"
    constant = OPERATORS.replace("normalised(x, eps)", "normalised(x, EPS)")
    assert with_operators(look, head=constant)["rows"]["demo::rms_norm_gate"] == [0, True]


def test_a_function_may_be_defined_again_and_other_schemas_are_refused(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    result = with_operators(
        """
x = torch.ones(16, 32)
first = [swiglu(x, x)[0, 0].item(), eagercache.stats().hits]
@eagercache.op("demo::swiglu")
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return x + y
second = [swiglu(x, x)[0, 0].item(), swiglu(x, x)[0, 0].item(), eagercache.stats().hits]
problem = ""
try:
    @eagercache.op("demo::swiglu")
    def swiglu(x: Tensor) -> Tensor:
        return x + 1
except ValueError as error:
    problem = str(error)
report(first=first, second=second, problem=problem)
"""
    )
    assert result["first"] == [pytest.approx(0.7310586), 1]
    assert result["second"] == [2.0, 2.0, 1]
    assert "demo::swiglu exists already" in result["problem"]


def test_gradients_pass_pytorchs_own_checks(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    result = with_operators(
        """
import warnings
warnings.simplefilter("ignore")
passed = {}
for function, args in calls(torch.float64, n=2):
    if function in (rms_norm_gate, swiglu):
        args = [a.detach()[..., :8].requires_grad_() for a in args]
    if function is lstm_gates:
        args = tensors((2, 16), (2, 4), dtype=torch.float64)
    torch.autograd.gradcheck(function, args)
    torch.autograd.gradgradcheck(function, args)
for function, args in calls():
    passed[function.name] = torch.library.opcheck(function.op, tuple(args))
    torch.library.opcheck(function.op, tuple(a.detach() for a in args))
report(passed=passed)
"""
    )
    assert len(result["passed"]) == 5
    for checks in result["passed"].values():
        assert len(checks) >= 4 and set(checks.values()) == {"SUCCESS"}


def test_compilers_see_one_operator(with_operators: Callable[..., dict[str, Any]]) -> None:
    result = with_operators(
        """
nodes = []
def backend(graph, inputs):
    from torch._dynamo.backends.common import aot_autograd
    def keep(graph, inputs):
        nodes.append([str(n.target) for n in graph.graph.nodes if "demo" in str(n.target)])
        return graph.forward
    return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)
x, y = tensors((16, 32), (16, 32))
compiled = torch.compile(lambda a, b: swiglu(a, b) + 1, backend=backend, fullgraph=True)
right = close([compiled(x, y)], [swiglu.function(x, y) + 1])
right &= close(torch.autograd.grad(compiled(x, y).sum(), (x, y)),
               torch.autograd.grad(swiglu.function(x, y).sum(), (x, y)))
class Model(torch.nn.Module):
    def forward(self, a, b):
        return swiglu(a, b)
program = torch.export.export(Model(), (x.detach(), y.detach()))
exported = [str(n.target) for n in program.graph.nodes if "demo" in str(n.target)]
right &= close([program.module()(x, y)], [swiglu.function(x, y)])
report(nodes=nodes, exported=exported, right=right)
"""
    )
    assert result["right"]
    assert result["nodes"] == [["demo.swiglu.default"], ["demo.swiglu_backward.default"]]
    assert result["exported"] == ["demo.swiglu.default"]


def test_kernels_hold_the_casts_of_autocast_and_gradients_are_the_functions(
    cache: Path,
) -> None:
    result = run_program(
        """
import torch, eagercache
from torch import Tensor
torch.manual_seed(0)
@eagercache.op("demo::projected")
def projected(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ w) / (x.sum() + 8)
f = projected.function
def tensors(rows):
    return torch.rand(rows, 32, requires_grad=True), torch.randn(32, 24, requires_grad=True)
def autocast():
    return torch.autocast("cpu", torch.bfloat16)
def row(name="demo::projected"):
    return eagercache.stats().operators[name]
def gradients(function, x, w, inside=False):
    with autocast():
        loss = function(x, w).square().sum()
        if inside:
            return torch.autograd.grad(loss, (x, w))
    return torch.autograd.grad(loss, (x, w))
def close(some, others):
    return all(a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-4)
               for a, b in zip(some, others, strict=True))
x, w = tensors(16)
same = {}
with eagercache.enable((), on_miss="wait", choose="always"):
    with autocast():
        projected(x.detach(), w.detach())
        mine = projected(x.detach(), w.detach())
        theirs = f(x, w)
    same["forward"] = mine.dtype == torch.bfloat16 and close([mine], [theirs])
    forward = row().hits
    gradients(projected, x, w)
    same["backward"] = close(gradients(projected, x, w), gradients(f, x, w))
    backward = row("demo::projected_backward").hits
    # In eager too the formulas run under the autocast that is on where gradients are asked for.
    mine = gradients(projected, x, w, inside=True)
    same["backward under autocast"] = close(mine, gradients(f, x, w, inside=True))
    inside = row("demo::projected_backward").hits - backward
    plain = projected(x, w)
    eager = f(x, w)
    same["without"] = torch.allclose(plain, eager)
    with autocast():  # a backward that needs no casts, in a block
        mine = torch.autograd.grad(plain.sum(), (x, w))
        theirs = torch.autograd.grad(eager.sum(), (x, w))
    same["only the backward under autocast"] = close(mine, theirs)
with eagercache.enable((), on_miss="native", choose="always"):
    x, w = tensors(8)  # of which there is no kernel
    with autocast():
        (projected(x, w).sum() + (x @ w).sum()).backward()
    mine = [t.grad.clone() for t in (x, w)]
    x.grad = w.grad = None
    with autocast():
        (f(x, w).sum() + (x @ w).sum()).backward()
    same["casts that others keep"] = close(mine, [x.grad, w.grad])
    torch._dynamo.reset()
    compiled = torch.compile(projected, backend="aot_eager")
    with autocast():
        answers = [compiled(x, w), compiled(x.detach(), w.detach())]
        theirs = f(x, w)
    same["compiled"] = close(answers, [theirs, theirs])
report(same=same, forward=forward, backward=backward, inside=inside)
""",
        cache,
        timeout=400,
        fills=True,
    )
    assert all(result["same"].values()), result["same"]
    assert (result["forward"], result["backward"], result["inside"]) == (1, 1, 0)


def test_kernels_whose_bits_matter_call_what_native_calls(cache: Path) -> None:
    result = run_program(
        """
import torch, eagercache
from torch import Tensor
torch.manual_seed(0)
@eagercache.op("demo::counted", autograd=False)
def counted(x: Tensor) -> Tensor:
    return (torch.sigmoid(x) * 2**24).to(torch.int32)  # the last bit of a sigmoid shows
@eagercache.op("demo::doubled", autograd=False)
def doubled(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * 2
x = torch.randn(64, 64)
equal = []
def call(f):
    f(x)
    equal.append(torch.equal(f(x), f.function(x)))
with eagercache.enable((), on_miss="wait", choose="always"):
    call(counted)
    call(doubled)
    torch.use_deterministic_algorithms(True)
    call(doubled)
    stats = eagercache.stats()
    numerics = sorted([k.op, k.facts.get("numerics", "")] for k in eagercache.kernels())
report(equal=equal, numerics=numerics, failures=stats.failures,
       hits={name: row.hits for name, row in stats.operators.items()})
""",
        cache,
        timeout=400,
        fills=True,
    )
    # Its own kernel of each: inlined functions failed the proof of the first one.
    assert result["numerics"] == [
        ["demo::counted", "bitwise"],
        ["demo::doubled", "accurate"],
        ["demo::doubled", "bitwise"],
    ]
    assert result["equal"][0] and not result["equal"][1] and result["equal"][2]
    assert result["failures"] == 0
    assert (result["hits"]["demo::counted"], result["hits"]["demo::doubled"]) == (1, 2)


def test_the_function_answers_under_transforms(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    result = with_operators(
        """
x, y = tensors((16, 32), (16, 32), needs=False)
same = {}
f = swiglu.function
same["vmap"] = torch.equal(torch.vmap(swiglu)(x, y), torch.vmap(f)(x, y))
same["vmap of gradients"] = close(
    [torch.vmap(torch.func.grad(lambda a, b: swiglu(a, b).sum()))(x, y)],
    [torch.vmap(torch.func.grad(lambda a, b: f(a, b).sum()))(x, y)])
same["jvp"] = close(torch.func.jvp(swiglu, (x, y), (y, x)), torch.func.jvp(f, (x, y), (y, x)))
with torch.inference_mode():
    made = swiglu(x, y)
same["inference"] = made.is_inference() and close([made], [f(x, y)])
same["meta"] = swiglu(x.to("meta"), y.to("meta")).shape == x.shape
report(same=same)
"""
    )
    assert all(result["same"].values()), result["same"]


def test_a_formula_of_the_users_own_is_honoured(
    with_operators: Callable[..., dict[str, Any]],
) -> None:
    result = with_operators(
        """
def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
def backward(ctx, grad):
    x, y = ctx.saved_tensors
    return grad * 3, grad * 5
swiglu.register_autograd(backward, setup_context=setup_context)
x, y = tensors((16, 32), (16, 32))
grads = torch.autograd.grad(swiglu(x, y).sum(), (x, y))
report(grads=[g[0, 0].item() for g in grads], hits=eagercache.stats().hits)
"""
    )
    assert result["grads"] == [3.0, 5.0]
    assert "Warning" not in result["stderr"]
    assert result["hits"] == 1


def test_the_first_call_enables_kernels_for_such_operators_alone(cache: Path) -> None:
    result = run_program(
        OPERATORS
        + """
x, y = tensors((16, 32), (16, 32), needs=False)
before = eagercache.is_enabled()
swiglu(x, y)
swiglu(x, y)
active = {row.op for row in eagercache.stats().operators.values() if row.active}
eagercache.disable()
swiglu(x, y)
report(before=before, active=sorted(op for op in active if not op.startswith("demo::")),
       misses=eagercache.stats().misses, swiglu="demo::swiglu" in active,
       after=eagercache.is_enabled())
""",
        cache,
        fills=True,
    )
    assert not result["before"] and result["swiglu"] and not result["active"]
    assert result["misses"] == 1 and not result["after"]


def test_without_acceleration_it_is_the_function(cache: Path) -> None:
    result = run_program(
        OPERATORS
        + """
x, y = tensors((16, 32), (16, 32))
same = close(gradients(swiglu, (x, y)), gradients(swiglu.function, (x, y)))
report(same=same, enabled=eagercache.is_enabled(), calls=eagercache.stats().misses)
""",
        cache,
        EAGERCACHE_DISABLE="1",
    )
    assert result["same"] and not result["enabled"] and result["calls"] == 0
