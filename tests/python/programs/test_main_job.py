"""The main job: miss, compile, hit; and a second process that finds the kernel on disk."""

from __future__ import annotations

from pathlib import Path

from conftest import Program

VAR_TWICE = """
import torch, eagercache
eagercache.enable(on_miss={on_miss!r}, choose="always")
x = torch.randn(512, 512)
first, second = torch.var(x, -1), torch.var(x, -1)
eagercache.disable()
native = torch.var(x, -1)
s = eagercache.stats()
report(misses=s.misses, compiles=s.compiles, hits=s.hits, loaded=s.loaded,
       close=bool(torch.allclose(first, native) and torch.allclose(second, native)))
"""


def test_first_call_compiles_second_hits_and_another_process_only_hits(program: Program) -> None:
    cold = program(VAR_TWICE.format(on_miss="wait"))
    assert (cold["misses"], cold["compiles"], cold["hits"]) == (1, 1, 1)
    assert cold["close"]
    warm = program(VAR_TWICE.format(on_miss="native"))
    assert (warm["misses"], warm["compiles"], warm["hits"]) == (0, 0, 2)
    assert warm["close"]
    disabled = program(VAR_TWICE.format(on_miss="wait"), EAGERCACHE_DISABLE="1")
    assert (disabled["misses"], disabled["compiles"], disabled["hits"]) == (0, 0, 0)


def test_disable_variable_overrides_nothing(program: Program) -> None:
    result = program(
        """
        import torch, eagercache
        before = torch._C._dispatch_dump("aten::var.correction")
        eagercache.enable()
        eagercache.register("aten::var.correction")
        report(same=torch._C._dispatch_dump("aten::var.correction") == before)
        """,
        EAGERCACHE_DISABLE="1",
    )
    assert result["same"]


def test_background_kernel_is_picked_up_without_restart(program: Program) -> None:
    result = program(
        """
        import torch, eagercache
        eagercache.enable(["var.correction"], choose="always")
        x = torch.randn(33, 65)
        native = [torch.var(x, -1) for _ in range(3)]
        assert eagercache.stats().hits == 0
        drained = eagercache.wait(200)
        answer = torch.var(x, -1)
        s = eagercache.stats()
        report(drained=drained, hits=s.hits, misses=s.misses, pending=s.pending,
               close=bool(torch.allclose(answer, native[0])))
        """,
        fills=True,
    )
    assert result["drained"] and result["close"]
    assert (result["misses"], result["pending"], result["hits"]) == (1, 2, 1)


def test_two_threads_missing_one_key_compile_once_and_are_both_right(program: Program) -> None:
    result = program(
        """
        import threading, torch, eagercache
        eagercache.enable(["var.correction"], on_miss="wait", choose="always")
        x = torch.randn(40, 70)
        expected = ((x - x.mean(-1, keepdim=True)) ** 2).sum(-1) / 69
        answers, gate = [], threading.Barrier(2)
        def call():
            gate.wait()
            answers.append(torch.var(x, -1))
        threads = [threading.Thread(target=call) for _ in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        eagercache.wait()
        torch.var(x, -1)
        s = eagercache.stats()
        report(compiles=s.compiles, hits=s.hits,
               right=all(torch.allclose(a, expected, atol=1e-5) for a in answers))
        """,
        fills=True,
    )
    assert result["compiles"] == 1
    assert result["right"] and result["hits"] >= 1


def test_a_compile_that_fails_is_said_once_remembered_and_leaves_the_operator_working(
    program: Program,
) -> None:
    code = """
        import torch, eagercache
        eagercache.enable(["var.correction"], on_miss="wait", choose="always")
        x = torch.randn(21, 34)
        answers = [torch.var(x, -1) for _ in range(3)]
        s = eagercache.stats()
        kernels = eagercache.kernels()
        report(failures=s.failures, compiles=s.compiles, hits=s.hits, native=s.native,
               misses=s.misses, decisions=[k.decision for k in kernels],
               equal=all(torch.equal(a, answers[0]) for a in answers))
        """
    broken = {"EAGERCACHE_CXX": "/bin/false"}
    result = program(code, fills=True, **broken)
    assert result["equal"]
    assert (result["hits"], result["compiles"]) == (0, 0)
    if result["misses"]:  # the compiler was accepted, and failed
        assert result["failures"] == 1
        assert result["decisions"] == ["failed"]
    assert result["stderr"].count("\n") <= 6, result["stderr"]


def test_skip_leaves_an_operator_alone(program: Program, cache: Path) -> None:
    code = """
        import torch, eagercache
        eagercache.enable(["var.correction", "std.correction"], skip={skip}, on_miss="native")
        torch.var(torch.ones(3, 3), -1); torch.std(torch.ones(3, 3), -1)
        report(ops=sorted(eagercache.stats().operators))
        """
    assert program(code.format(skip="['var']"))["ops"] == ["aten::std.correction"]
    by_variable = program(code.format(skip="()"), EAGERCACHE_SKIP="aten::var.correction")
    assert by_variable["ops"] == ["aten::std.correction"]


def test_enable_is_a_context_manager_that_puts_the_state_back(program: Program) -> None:
    result = program(
        """
        import torch, eagercache
        x = torch.ones(4, 4)
        with eagercache.enable(["var.correction"], on_miss="native") as outer:
            assert outer.active and eagercache.is_enabled()
            with eagercache.enable(["std.correction"], on_miss="native"):
                torch.var(x, -1)   # not among this block's operators
                torch.std(x, -1)
            torch.var(x, -1)
            torch.std(x, -1)
        assert not eagercache.is_enabled()
        torch.var(x, -1)
        report(calls={n: o.misses + o.native + o.hits
                      for n, o in eagercache.stats().operators.items()})
        """
    )
    assert result["calls"] == {"aten::var.correction": 1, "aten::std.correction": 1}


def test_somebody_registering_over_us_is_seen_and_said_once(program: Program) -> None:
    result = program(
        """
        import warnings, torch, eagercache
        eagercache.enable(["var.correction"], on_miss="native")
        library = torch.library.Library("aten", "IMPL")
        library.impl("var.correction", lambda *a, **k: torch.zeros(7), "CPU")
        answer = torch.var(torch.ones(4, 4), -1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = eagercache.stats(), eagercache.stats()
        report(shape=list(answer.shape), shadowed=first.shadowed, said=len(caught))
        """
    )
    assert result["shape"] == [7]
    assert (result["shadowed"], result["said"]) == (1, 1)


def test_an_aten_kernel_that_is_a_python_function_is_left_alone(program: Program) -> None:
    result = program(
        """
        import warnings, torch, eagercache
        library = torch.library.Library("aten", "IMPL")
        library.impl("var.correction", lambda *a, **k: torch.zeros(7), "CPU")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            eagercache.enable(["var.correction"], on_miss="native")
        report(shape=list(torch.var(torch.ones(4, 4), -1).shape),
               ops=list(eagercache.stats().operators), said=[str(w.message) for w in caught])
        """
    )
    assert result["shape"] == [7]
    assert result["ops"] == []
    assert any("Python function" in text for text in result["said"])


def test_cuda_operators_are_hooked_where_asked_and_no_context_is_made(program: Program) -> None:
    result = program(
        """
        import warnings, torch, eagercache
        from eagercache import _C
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            eagercache.enable(["var.correction"], devices=["cuda"])
        asked = sorted(eagercache.stats().operators)
        torch.var(torch.ones(3, 3), -1)
        eagercache.enable(["std.correction"])
        default = sorted(eagercache.stats().operators)
        report(said=[str(w.message) for w in caught], asked=asked, default=default,
               driver=_C.has_cuda_driver(), cuda=torch.cuda.is_initialized())
        """
    )
    assert result["said"] == []
    assert result["asked"] == ["aten::var.correction @CUDA"]
    assert ("aten::std.correction @CUDA" in result["default"]) == result["driver"]
    assert "aten::std.correction" in result["default"]
    assert result["cuda"] is False
