"""The same bits in every run: freeze(), deterministic algorithms, numerics="bitwise"."""

from __future__ import annotations

from conftest import Program


def test_after_freeze_no_new_kernel_answers_and_old_ones_go_on(warm_program: Program) -> None:
    result = warm_program(
        """
        torch.var(x, -1)
        eagercache.freeze()
        frozen = eagercache.stats().frozen
        before = eagercache.stats()
        torch.var(x, -1)
        for _ in range(4):
            torch.softmax(x, -1)  # in the store, and not met before
        s = eagercache.stats()
        kernels = {k.op for k in eagercache.kernels()}
        eagercache.enable(["_softmax"], on_miss="native", choose="always")
        torch.softmax(x, -1); torch.softmax(x, -1)
        report(frozen=frozen, var=s.operators["aten::var.correction"].hits,
               softmax=s.operators["aten::_softmax"].hits, loaded=[before.loaded, s.loaded],
               kernels=sorted(kernels), thawed=not eagercache.is_frozen(),
               later=eagercache.stats().operators["aten::_softmax"].hits)
        """
    )
    assert result["frozen"] and result["thawed"]
    assert (result["var"], result["softmax"]) == (2, 0)
    assert result["loaded"][0] == result["loaded"][1]
    assert result["kernels"] == ["aten::var"]
    assert result["later"] >= 1


def test_the_end_of_a_with_block_ends_a_freeze_that_began_in_it(warm_program: Program) -> None:
    result = warm_program(
        """
        with eagercache.enable(["_softmax"], on_miss="native", choose="always"):
            eagercache.freeze()
        inside = eagercache.is_frozen()
        eagercache.freeze()
        with eagercache.enable(["_softmax"], on_miss="native", choose="always"):
            pass
        report(inside=inside, outside=eagercache.is_frozen())
        """
    )
    assert (result["inside"], result["outside"]) == (False, True)


def test_under_deterministic_algorithms_only_bitwise_kernels_answer(warm_program: Program) -> None:
    # The key says whether deterministic algorithms are asked for, so that switching them on and off
    # between two calls is obeyed by each.
    result = warm_program(
        """
        native = {}
        eagercache.disable()
        for name, call in (("var", lambda: torch.var(x, -1)), ("relu", lambda: torch.relu(x))):
            native[name] = call()
        eagercache.enable(['var.correction', 'relu'], on_miss='native', choose='always')
        def hits(op):
            return eagercache.stats().operators[op].hits
        rows = []
        for deterministic in (False, True, False, True):
            torch.use_deterministic_algorithms(deterministic)
            begin = hits("aten::var.correction"), hits("aten::relu")
            var, relu = torch.var(x, -1), torch.relu(x)
            rows.append([hits("aten::var.correction") - begin[0], hits("aten::relu") - begin[1],
                         torch.equal(var, native["var"]), torch.equal(relu, native["relu"])])
        torch.use_deterministic_algorithms(False)
        reasons = [k.reason for k in eagercache.kernels() if k.op == "aten::var"]
        numerics = {k.op: k.numerics for k in eagercache.kernels() if k.decision == "kernel"}
        report(rows=rows, reasons=reasons, numerics=numerics)
        """
    )
    assert result["numerics"] == {"aten::var": "accurate", "aten::relu": "bitwise"}
    for hits_of_var, hits_of_relu, *equal in (result["rows"][1], result["rows"][3]):
        assert (hits_of_var, hits_of_relu, *equal) == (0, 1, True, True)
    for hits_of_var, hits_of_relu, *_ in (result["rows"][0], result["rows"][2]):
        assert (hits_of_var, hits_of_relu) == (1, 1)
    assert "not bitwise, and deterministic algorithms are asked for" in result["reasons"]


def test_bitwise_numerics_leave_accurate_kernels_alone(warm_program: Program) -> None:
    result = warm_program(
        """
        eagercache.enable(on_miss="native", choose="always", numerics="bitwise")
        torch.var(x, -1); torch.relu(x)
        s = eagercache.stats().operators
        report(var=s["aten::var.correction"].hits, relu=s["aten::relu"].hits)
        """
    )
    assert (result["var"], result["relu"]) == (0, 1)
