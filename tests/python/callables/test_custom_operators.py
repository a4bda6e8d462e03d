"""Operators made of Python functions by `eagercache.op`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.callables import function_identity
from eagercache.callables.module_identity import Unfit

FUTURE = "from __future__ import annotations\n"
IMPORT = "from fused_functions import"


def _operators() -> str:
    """The functions and their calls as one text, without imports of files and of __future__."""
    zoo = Path(__file__).parent.with_name("operator_zoo.py")
    lines = zoo.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "EXAMPLES" not in line and not line.startswith(IMPORT)]
    functions = zoo.parents[2] / "examples" / "fused_functions.py"
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
    assert result["hits"] == 1


def test_what_cannot_be_compiled_is_refused_with_its_line_and_goes_on(cache: Path) -> None:
    result = run_program(
        """
import warnings
import torch, eagercache
from torch import Tensor
calls = []
table = torch.ones(4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    @eagercache.op("demo::prints")
    def prints(x: Tensor) -> Tensor:
        print("hello")
        return x + 1
    at_decoration = [str(w.message) for w in caught]
    @eagercache.op("demo::captures")
    def captures(x: Tensor) -> Tensor:
        return x + table
    @eagercache.op("demo::branches")
    def branches(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 0:
            return y
        return -y
    @eagercache.op("demo::writes")
    def writes(x: Tensor) -> Tensor:
        y = x * 2
        x.mul_(1)
        return y
    @eagercache.op("demo::counts")
    def counts(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2
    @eagercache.op("demo::asks")
    def asks(x: Tensor) -> Tensor:
        return x * (3 if x.requires_grad else 2)
    @eagercache.op("demo::draws")
    def draws(x: Tensor) -> Tensor:
        return x * 0 + torch.rand_like(x) * 0
    eagercache.enable((), on_miss="wait", choose="always")
    answers = []
    operators = prints, captures, branches, writes, counts, asks, draws
    for op in operators:
        answers += [op(torch.ones(4))[0].item() for _ in range(3)]
    eagercache.wait(60)
report(at_decoration=at_decoration, answers=answers,
       warnings=[str(w.message) for w in caught], hits=eagercache.stats().hits,
       places=[(w.filename, w.lineno) for w in caught],
       counts_at=(counts.function.__code__.co_filename, counts.function.__code__.co_firstlineno),
       explained=str(eagercache.explain(branches, torch.ones(4))),
       reasons={op.name: op.refusal for op in operators})
""",
        cache,
        fills=True,
    )
    assert result["answers"] == [2.0] * 18 + [0.0] * 3
    assert result["hits"] == 0
    reasons = result["reasons"]
    assert reasons["demo::prints"].endswith("of prints: it calls print()")
    assert "of captures: table is a tensor" in reasons["demo::captures"]
    assert "of branches: it reads a tensor's value" in reasons["demo::branches"]
    assert "of writes: it writes to an argument (aten::mul_)" in reasons["demo::writes"]
    assert "of counts: it changes what it refers to" in reasons["demo::counts"]
    assert "of asks: it reads requires_grad of a tensor" in reasons["demo::asks"]
    assert "of draws: it draws random numbers (aten::rand_like)" in reasons["demo::draws"]
    assert all(reason.startswith("line ") for reason in reasons.values())
    at = result["counts_at"]
    assert f"line {at[1]} of counts" in reasons["demo::counts"] and at in result["places"]
    assert any("demo::prints stays uncompiled" in text for text in result["at_decoration"])
    assert len([text for text in result["warnings"] if "stays uncompiled" in text]) == 7
    assert reasons["demo::branches"] in result["explained"]


def test_an_operator_of_torch_library_is_traced_where_its_function_is_known(cache: Path) -> None:
    result = run_program(
        """
import torch, eagercache
from torch import Tensor
@torch.library.custom_op("other::known", mutates_args=())
def known(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * y + x
library = torch.library.Library("other", "FRAGMENT")
library.define("opaque(Tensor x) -> Tensor")
library.impl("opaque", lambda x: x + 1, "CPU")
eagercache.enable(["other::known", "other::opaque"], on_miss="wait", choose="always")
x = torch.rand(8, 8)  # of large negative numbers tanh(x) * x + x leaves nothing but rounding
right = all(torch.allclose(known(x, x), torch.tanh(x) * x + x) for _ in range(3))
right &= all(torch.equal(torch.ops.other.opaque(x), x + 1) for _ in range(3))
rows = {k.op: [k.decision, k.reason] for k in eagercache.kernels()}
report(right=right, rows=rows, hits=eagercache.stats().hits,
       explained=str(eagercache.explain(torch.ops.other.opaque, x)))
""",
        cache,
        fills=True,
    )
    assert result["right"] and result["hits"] == 2
    assert result["rows"]["other::known"][0] == "kernel"
    assert result["rows"]["other::opaque"][0] == "native"
    assert "its code is not known" in result["explained"]


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


def test_names_and_functions_that_make_no_operator() -> None:
    from eagercache import op

    for name in ("swiglu", "aten::swiglu", "a::b::c", "a::"):
        with pytest.raises(ValueError, match="namespace"):
            op(name)
    with pytest.raises(TypeError, match="Python function"):
        op("demo::torch_abs")(torch.abs)
    with pytest.raises(ValueError, match=r"demo::untyped: .*name a schema="):
        op("demo::untyped")(_function("def f(x):\n    return x\n"))


def _function(source: str, **namespace: Any) -> types.FunctionType:
    scope: dict[str, Any] = {"torch": torch, "__name__": "demo_functions", **namespace}
    exec(source, scope)
    function = scope["f"]
    assert isinstance(function, types.FunctionType)
    return function


def _digest(source: str, **namespace: Any) -> str:
    return function_identity.identify_function(_function(source, **namespace)).digest


@pytest.mark.once
def test_whatever_the_function_can_reach_is_in_its_identity() -> None:
    helper = "def g(x):\n    return x * {0}\n"
    source = "def f(x):\n    return g(x) + K\n"
    known = _digest(helper.format(2) + source, K=1.0)
    assert known == _digest("\n\n" + helper.format(2) + source, K=1.0), "not where it stands"
    assert known == _digest(helper.format(2) + source, K=1.0, other=5), "not what it does not read"
    assert known != _digest(helper.format(3) + source, K=1.0)
    assert known != _digest(helper.format(2) + source, K=2.0)
    assert known != _digest(helper.format(2) + source, K=1)
    assert known != _digest(helper.format(2) + "def f(x, y=1):\n    return g(x) + K\n", K=1.0)
    table = "def f(x):\n    return x * table['a'][0]\n"
    assert _digest(table, table={"a": [1]}) != _digest(table, table={"a": [2]})
    closure = "def make(n):\n    def f(x):\n        return x * n\n    return f\nf = make({0})\n"
    assert _digest(closure.format(1)) != _digest(closure.format(2))
    method = "class A:\n    def m(x):\n        return x * {0}\ndef f(x):\n    return A.m(x)\n"
    assert _digest(method.format(1)) != _digest(method.format(2))


@pytest.mark.once
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(x):\n    global K\n    K = 1\n    return x\n",
            "line 3 of f: it changes the global K",
        ),
        ("def f(x):\n    return x * random.random()\n", "line 2 of f: it uses random"),
        ("def f(x):\n    return x * missing\n", "line 2 of f: missing is not defined"),
        ("def f(x):\n    return layer(x)\n", "line 2 of f: layer is a module"),
        ("def f(x):\n    return g(x)\ndef g(x):\n    open('x')\n", "line 4 of g: it calls open()"),
        ("def f(x):\n    yield x\n", "line 2 of f: it is a generator"),
    ],
)
def test_a_function_that_is_none_of_its_arguments_alone_is_refused(
    source: str, message: str
) -> None:
    import random

    with pytest.raises(Unfit, match=message.replace("(", r"\(").replace(")", r"\)")):
        _digest(source, random=random, layer=torch.nn.Linear(2, 2))


def test_register_autograd_warns_of_nothing() -> None:
    code = """
import warnings
warnings.simplefilter("error")
import torch, eagercache
@eagercache.op("quiet::clipped")
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-1, 1) * 2
clipped.register_autograd(lambda ctx, grad: grad * 3)
x = torch.randn(8, requires_grad=True)
clipped(x).sum().backward()
report(gradient=x.grad.tolist())
"""
    assert run_program(code, None)["gradient"] == [3.0] * 8
