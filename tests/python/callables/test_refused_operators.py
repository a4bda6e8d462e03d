"""Functions that are no operators, that have no kernel, or that their code tells from others."""

from __future__ import annotations

import dis
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.callables import function_identity
from eagercache.callables.module_identity import Unfit


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


def test_an_operator_that_says_what_it_writes_is_its_functions_without_a_word(cache: Path) -> None:
    result = run_program(
        """
import warnings
import torch, eagercache
from torch import Tensor
warnings.simplefilter("error")
@eagercache.op("demo::adds", mutates_args=("x",))
def adds(x: Tensor, y: Tensor) -> None:
    x.add_(y)
eagercache.enable(ops=(), on_miss="wait", choose="always")
x, y = torch.zeros(3), torch.ones(3)
for _ in range(4):
    adds(x, y)
asked = eagercache.stats().compiles
report(x=x.tolist(), asked=asked, explained=str(eagercache.explain(adds, x, y)),
       overload=str(eagercache.explain(torch.ops.demo.adds.default, x, y)))
""",
        cache,
        fills=True,
    )
    assert result["x"] == [4.0] * 3 and result["asked"] == 0
    assert result["explained"].startswith("demo::adds: native, its schema says that it writes")
    assert result["overload"] == result["explained"]


def test_names_and_functions_that_make_no_operator() -> None:
    from eagercache import op

    for name in ("swiglu", "aten::swiglu", "a::b::c", "a::"):
        with pytest.raises(ValueError, match="namespace"):
            op(name)
    with pytest.raises(TypeError, match=r"not @eagercache\.op"):
        op(test_names_and_functions_that_make_no_operator)  # type: ignore[arg-type]
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
        ("def f(x):\n    return [x for w in words]\n", "line 2 of f: words is a set"),
        ("def f(x):\n    return [x for w in {'a', 'b'}]\n", "line 2 of f: it makes a set"),
        ("def f(x):\n    return max({1, 2, 3}, key=abs)\n", "line 2 of f: it makes a set"),
        ("def f(x):\n    return {y for y in x}\n", "line 2 of <setcomp>: it makes a set"),
        ("def f(x):\n    return x * id(words)\n", "line 2 of f: it asks for id()"),
        ("def f(x):\n    return x * 'a'.__hash__()\n", "line 2 of f: it asks for a hash"),
        ("def f(x):\n    return frozenset(x)\n", "line 2 of f: it makes a set"),
        ("def f(x):\n    return table['k']\n", "line 2 of f: table is a dict"),
        (
            "def make(T):\n    def f(x):\n        return len(T)\n    return f\nf = make(words)\n",
            "line 2 of f: T is a set",
        ),
    ],
)
def test_a_function_that_is_none_of_its_arguments_alone_is_refused(
    source: str, message: str
) -> None:
    import random

    if sys.version_info >= (3, 12):  # a comprehension is no function of its own
        message = message.replace("<setcomp>", "f")
    names = {"layer": torch.nn.Linear(2, 2), "words": {"a", "b"}, "table": {"k": {"a", "b"}}}
    with pytest.raises(Unfit, match=message.replace("(", r"\(").replace(")", r"\)")):
        _digest(source, random=random, **names)


@pytest.mark.once
def test_a_set_that_is_only_asked_for_a_member_is_one_without_an_order() -> None:
    source = "def f(x):\n    return x in WORDS or x in {'a', 'b'} or x in A.words or x in {x, 1}\n"
    held = "class A:\n    words = {'c', 'd'}\n"
    closure = "def make(T):\n    def f(x):\n        return x in T\n    return f\nf = make({0})\n"
    known = _digest(held + source, WORDS={"a", "b"})
    assert known == _digest(held + source, WORDS={"b", "a"})
    assert known != _digest(held + source, WORDS={"a", "c"})
    assert known != _digest(held + source, WORDS=frozenset({"a", "b"}))
    assert _digest(closure.format("{1, 2}")) != _digest(closure.format("{1, 3}"))


def test_lines_are_known_of_instructions_without_positions() -> None:
    # Such are those of Python 3.10.
    function = _function("def f(x):\n    y = x * 2\n    return y + g\n")
    code = function.__code__
    seen = [
        function_identity._line(code, types.SimpleNamespace(offset=start))  # type: ignore[arg-type]
        for start, line in dis.findlinestarts(code)
        if line in (2, 3)
    ]
    assert seen == ["line 2 of f", "line 3 of f"]


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
