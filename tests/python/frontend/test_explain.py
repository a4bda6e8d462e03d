"""explain(): which answer a call would get, and why."""

from __future__ import annotations

from conftest import Program


def test_hits_misses_asides_and_native_calls_are_told_apart(warm_program: Program) -> None:
    result = warm_program(
        """
        from eagercache import explain
        torch.var(x, -1)                     # loads the kernel
        before = eagercache.stats()
        said = {
            "hit": explain("var", x, -1),
            "miss": explain(torch.var, torch.randn(5, 96), -1),
            "aside": explain("aten::_softmax", torch.empty(0, 5), -1, False),
            "library": explain("mm", x, x.t()),
            "disabled": explain("tanh", x),
            "view": explain(torch.ops.aten.view.default, x, [96, 64]),
            "function": explain(forward, x),
            "matmul": explain(torch.matmul, x, x.t()),
            "nonzero": explain(torch.nonzero, x),
        }
        after = eagercache.stats()
        report(
            said={n: [e.op, e.outcome, e.rule, e.reason, e.difference] for n, e in said.items()},
            parts=[[p.op, p.outcome] for p in said["function"].parts],
            text=str(said["miss"]),
            nearest=said["miss"].nearest_state,
            counted=[before.hits, after.hits, before.misses, after.misses],
        )
        """
    )
    said = result["said"]
    assert said["hit"][:2] == ["aten::var.correction", "hit"]
    assert said["miss"][:2] == ["aten::var.correction", "miss"]
    assert "sizes [5, 96] is not [64, 96]" in said["miss"][4]
    assert result["nearest"] == "kernel"
    assert said["miss"][4] in result["text"]
    assert said["aside"][:3] == ["aten::_softmax", "aside", "empty_tensor"]
    assert said["library"][1] == "native" and "library call" in said["library"][3]
    # A function of torch's is told by the operator of its name.
    assert "composite" in said["matmul"][3] and "depends on values" in said["nonzero"][3]
    assert said["disabled"][1] == "native" and "not among the enabled" in said["disabled"][3]
    assert said["view"][1] == "native" and "view" in said["view"][3]
    assert [op for op, _ in result["parts"]] == ["aten::native_layer_norm", "aten::relu"]
    assert result["counted"][0] == result["counted"][1]
    assert result["counted"][2] == result["counted"][3]


def test_a_miss_in_a_fresh_process_is_compared_with_what_the_store_knows(
    warm_program: Program,
) -> None:
    result = warm_program(
        """
        first = eagercache.explain("var", torch.randn(8, 96), -1)
        known = eagercache.explain("var", x, -1)
        report(outcome=first.outcome, difference=first.difference, state=first.nearest_state,
               known=[known.outcome, known.reason])
        """
    )
    assert result["outcome"] == "miss"
    assert "sizes" in result["difference"] and "64" in result["difference"]
    assert result["state"] == "kernel"
    assert result["known"][0] == "miss" and "store has a verdict" in result["known"][1]


# What decides calls that have no verdict, and never will: (call, outcome, words of the reason).
RULES = """
    torch.rand, 3 | native | it draws random numbers
    torch.empty, 3 | native | unspecified
    torch.sort, x | native | can have kernels, but is not among the enabled
    torch.var, x.to("meta"), -1 | native | no data
    torch.var, FakeTensorMode().from_tensor(x), -1 | native | no data
    torch.sigmoid, x, out=torch.empty_like(x) | native | not among the enabled
    torch.mm, x, x.T | native | library call
    torch.prod, x, 0 | native | depends on the order of the factors
    torch.pow, x.double(), x.double() | native | its last bit is not always native's
    torch.prod, x.double(), 0 | miss | not met before
    torch.Tensor.item, x.sum() | native | it is composite
    torch.Tensor.view, x, -1 | native | view
    torch.nonzero, x | native | depends on values
    torch.var, x[:0], -1 | aside | no elements
    torch.floor_divide, torch.arange(4), torch.arange(1, 5) | aside | integers
    torch.clone, x.to(torch.float8_e4m3fn) | aside | rare dtype
    torch.clone, torch.quantize_per_tensor(x, 0.1, 0, torch.qint8) | native | another way of
"""


def test_what_a_rule_decides_is_not_said_to_be_unknown(program: Program) -> None:
    rows = [[cell.strip() for cell in line.split("|")] for line in RULES.strip().splitlines()]
    result = program(
        f"""
        import torch, eagercache
        eagercache.enable(["var", "prod", "pow.Tensor_Tensor", "floor_divide", "clone"])
        x = torch.randn(64, 96)
        from torch._subclasses import FakeTensorMode
        said = []
        for call in {[call for call, _, _ in rows]!r}:
            one = eval(f"eagercache.explain({{call}})")
            said.append([one.outcome, one.reason])
        torch.var(x, -1)
        report(said=said, once=eagercache.explain(torch.var, x, -1).reason)
        """
    )
    for (call, outcome, words), (found, reason) in zip(rows, result["said"], strict=True):
        assert (found, words in reason) == (outcome, True), (call, found, reason)
    assert result["once"] == "a kernel is asked for once it was made 2 times; so far: 1"


def test_errors_of_native_pass_and_later_calls_are_answered_as_ever(warm_program: Program) -> None:
    result = warm_program(
        """
        texts = []
        for call in (lambda: eagercache.explain("var", x, 7), lambda: torch.var(x, 7),
                     lambda: eagercache.explain("no_such_operator", x),
                     lambda: eagercache.explain(3)):
            try:
                call()
            except Exception as error:
                texts.append(type(error).__name__ + ": " + str(error))
        torch.var(x, -1)
        report(texts=texts, hits=eagercache.stats().hits)
        """
    )
    assert result["texts"][0] == result["texts"][1]
    assert result["texts"][2].startswith("UnknownOperator")
    assert result["texts"][3].startswith("TypeError")
    assert result["hits"] == 1
