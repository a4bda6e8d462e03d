"""The search for faster forms of CUDA kernels, and what it goes by; no GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagercache.base import entry_facts
from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.cuda import final_reductions
from eagercache.worker.cuda.compile import CudaLowered
from eagercache.worker.cuda.final_reductions import with_launches
from eagercache.worker.cuda.forms import APART, FIRST, Form, other_forms
from eagercache.worker.cuda.wrapper import Call as Launched
from eagercache.worker.cuda.wrapper import FinalReduction, Value, read_wrapper
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.jobs import cuda_search
from eagercache.worker.jobs.clock import Clock
from eagercache.worker.jobs.cuda_job import CudaJob
from eagercache.worker.jobs.cuda_search import Tried, is_worth_it, search
from eagercache.worker.timing import bandwidth
from eagercache.worker.timing.cuda_timing import CudaTiming


def timing(device_ns: float) -> CudaTiming:
    return CudaTiming(
        native_ns=100_000.0,
        kernel_ns=device_ns,
        ratio_low=0.0,
        ratio_high=1.0,
        pairs=25,
        calls=1,
        native_host_ns=5_000.0,
        kernel_host_ns=5_000.0,
        native_device_ns=100_000.0,
        kernel_device_ns=device_ns,
        host_high=1.0,
        device_high=1.0,
    )


def tried(name: str, device_ns: float) -> Tried:
    return Tried(Form(name), None, timing(device_ns), name)  # type: ignore[arg-type]


FIRST_TRIED = tried("first", 80_000.0)


def searched(
    times: dict[str, float],
    prove: Callable[[Tried], None] = lambda _: None,
    budget: float = 60.0,
) -> Tried:
    def attempt(form: Form, known: set[str]) -> Tried | None:
        return tried(form.name, times[form.name]) if times[form.name] else None

    return search(FIRST_TRIED, [Form(name) for name in times], attempt, prove, budget)


def test_the_fastest_is_taken() -> None:
    assert searched({"a": 70_000.0, "b": 50_000.0, "c": 60_000.0}).form.name == "b"


def test_what_is_faster_by_noise_alone_is_not() -> None:
    assert searched({"a": 79_500.0}) is FIRST_TRIED


def test_the_next_one_is_taken_where_the_fastest_does_not_prove() -> None:
    def prove(one: Tried) -> None:
        if one.form.name == "b":
            raise ProofFailed("other bits")

    assert searched({"a": 70_000.0, "b": 50_000.0}, prove).form.name == "a"
    assert searched({"b": 50_000.0}, prove) is FIRST_TRIED


def test_a_form_that_cannot_be_had_is_left() -> None:
    def attempt(form: Form, known: set[str]) -> Tried | None:
        if form.name == "a":
            raise CompileRefused("generated text not understood")
        return tried(form.name, 40_000.0)

    found = search(FIRST_TRIED, [Form("a"), Form("b")], attempt, lambda _: None, 60.0)
    assert found.form.name == "b"


def test_an_error_of_the_device_ends_the_search() -> None:
    def attempt(form: Form, known: set[str]) -> Tried | None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        search(FIRST_TRIED, [Form("a")], attempt, lambda _: None, 60.0)


def test_a_kernel_that_is_known_is_told_to_whoever_makes_the_next() -> None:
    seen: list[set[str]] = []

    def attempt(form: Form, known: set[str]) -> Tried | None:
        seen.append(set(known))
        return tried(form.name, 90_000.0)

    search(FIRST_TRIED, [Form("a"), Form("b")], attempt, lambda _: None, 60.0)
    assert seen == [{"first"}, {"first", "a"}]


def test_no_form_is_begun_when_the_budget_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 25.0])
    monkeypatch.setattr(cuda_search.time, "monotonic", lambda: next(clock))
    assert searched({"a": 70_000.0, "b": 50_000.0}, budget=20.0).form.name == "a"


@pytest.mark.parametrize(
    ("device_ns", "moved", "worth"),
    [
        (5_000.0, 0, False),  # its launch is what one waits for
        (100_000.0, 0, True),  # nobody knows what it moves
        (100_000.0, 290_000_000, False),  # 2,900 of 3,000 GB/s
        (100_000.0, 200_000_000, True),
    ],
)
def test_what_is_near_a_copys_speed_is_not_searched(
    device_ns: float, moved: int, worth: bool
) -> None:
    assert is_worth_it(timing(device_ns), moved, 3_000.0) is worth


def test_forms_of_a_pointwise_kernel_and_of_a_reduction() -> None:
    def names(**of: bool) -> list[str]:
        return [form.name for form in other_forms(FIRST, **of)]

    assert names(reduces=False, mixes=False) == ["tuned"]
    assert names(reduces=True, mixes=False) == ["whole rows", "tuned", "looped"]
    assert names(reduces=True, mixes=True)[-1] == "tuned apart"
    assert not FIRST.options


def test_forms_beside_a_first_one_whose_sums_are_apart_have_them_apart() -> None:
    forms = other_forms(APART, reduces=True, mixes=False)
    assert [form.name for form in forms] == ["whole rows", "tuned", "looped"]
    assert all(form.options["triton.mix_order_reduction"] is False for form in forms)
    assert forms[0].whole_rows


def test_rows_are_kept_while_a_form_says_so_and_not_longer() -> None:
    from torch._inductor.choices import InductorChoices

    before = InductorChoices.should_use_persistent_reduction
    with other_forms(FIRST, reduces=True, mixes=False)[0].chosen():
        assert InductorChoices.should_use_persistent_reduction is not before
    assert InductorChoices.should_use_persistent_reduction is before
    with FIRST.chosen():
        assert InductorChoices.should_use_persistent_reduction is before


def test_rows_up_to_the_longest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import sympy
    from eagercache.worker.compat import triton_kernels
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    class Features:
        def __init__(self, numel: Any) -> None:
            self.reduction_numel = numel

        def get_reduction_hint(self) -> ReductionHint:
            return ReductionHint.INNER

    monkeypatch.setattr(
        InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False)
    )
    with triton_kernels.rows_kept(4096):
        keeps = InductorChoices.should_use_persistent_reduction
        assert keeps(Features(sympy.Integer(4096)), False)  # type: ignore[arg-type]
        assert not keeps(Features(sympy.Integer(4097)), False)  # type: ignore[arg-type]
        assert not keeps(Features(sympy.Symbol("s0", integer=True)), False)  # type: ignore[arg-type]
        assert not keeps(Features(sympy.Integer(64)), True)  # type: ignore[arg-type]


STATE = {
    "default_dtype": "float32",
    "deterministic": False,
    "deterministic_warn_only": False,
    "fill_uninitialized_memory": True,
    "num_threads": 1,
}


def described(op: str, *sizes: tuple[int, ...], dtype: str = "float32") -> Call:
    """A call on contiguous tensors, with the schema's other arguments left out."""
    names = [a.name for a in getattr(torch.ops.aten, op).default._schema.arguments]
    args = [
        {
            "name": name,
            "kind": "tensor",
            "dtype": dtype,
            "device": "cpu",
            "sizes": list(size),
            "strides": [math.prod(size[i + 1 :]) for i in range(len(size))],
            "aligned": True,
            "wrapped": False,
        }
        for name, size in zip(names, sizes, strict=True)
    ]
    return Call(
        {"op": f"aten::{op}", "overload": "", "dispatch_key": "CPU", "state": STATE, "args": args}
    )


def test_bytes_of_inputs_and_outputs_are_counted_once() -> None:
    call = described("tanh", (1024, 64))
    assert bandwidth.bytes_moved(call, [torch.empty(1024, 64)]) == 2 * 1024 * 64 * 4


def test_what_is_written_in_place_is_read_and_written() -> None:
    call = described("tanh_", (1024, 64))
    given = torch.empty(1024, 64)
    assert bandwidth.bytes_moved(call, [given]) == 2 * 1024 * 64 * 4


def test_small_calls_have_no_bandwidth_and_large_ones_have() -> None:
    assert bandwidth.facts_of(described("tanh", (64, 64)), [torch.empty(64, 64)]) == {}
    large = described("tanh", (2048, 1024))
    facts = bandwidth.facts_of(large, [torch.empty(2048, 1024)])
    assert facts["bytes"] == str(16 << 20)
    assert float(facts["copy_gbps"]) > 0.1


def test_the_share_of_a_copy_is_read_from_facts() -> None:
    facts = {"bytes": "2000", "kernel_ns": "10", "copy_gbps": "400"}
    assert entry_facts.gigabytes_per_second(facts) == 200.0
    assert entry_facts.share_of_copy(facts) == 0.5
    assert entry_facts.share_of_copy({**facts, "kernel_device_ns": "5"}) == 1.0
    assert entry_facts.gigabytes_per_second({"kernel_ns": "10"}) is None


MIXED = """
def call(args):
    arg0_1, = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((256, 64), (64, 1), torch.bfloat16)
        workspace_0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        triton_mixed.run(arg0_1, buf0, workspace_0, 256, 64, stream=stream0)
        buf1 = workspace_0[0 * 8 * 64 : (0 + 1) * 8 * 64].view(8, 64).sum(dim=0)
        buf2 = workspace_0[1 * 8 * 64 : (1 + 1) * 8 * 64].view(8, 64).sum(dim=0).to(torch.bfloat16)
        del workspace_0
    return (buf0, buf1, buf2, )
"""

SMALL = """
def call(args):
    arg0_1, = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((2, 64), (64, 1), torch.float32)
        buf1 = empty_strided_cuda((64, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        triton_a.run(arg0_1, buf0, 128, stream=stream0)
        triton_b.run(buf0, buf1, 64, stream=stream0)
    return (buf1, )
"""


def test_partial_results_that_eager_adds_up_are_understood() -> None:
    text = read_wrapper(MIXED)
    first, second = text.calls[1:]
    assert isinstance(first, FinalReduction)
    assert isinstance(second, FinalReduction)
    assert (first.source.sizes, first.source.offset) == ((8, 64), 0)
    assert (second.source.sizes, second.source.offset) == ((8, 64), 512)
    assert [output.dtype for output in text.output_specs()] == ["bfloat16", "float32", "bfloat16"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(0 + 1) * 8", "(1 + 1) * 8"),
        ("view(8, 64).sum(dim=0)\n", "view(4, 64).sum(dim=0)\n"),
        ("0 * 8 * 64", "0 * 8 * 32"),
        ("1 * 8 * 64 : (1 + 1)", "2 * 8 * 64 : (2 + 1)"),  # outside of the workspace
        ("(1024, ), (1, ), torch.float32", "(4096, ), (1, ), torch.uint8"),
        ("sum(dim=0)\n", "prod(dim=0)\n"),
        (".to(torch.bfloat16)", ".to(torch.float8_e4m3fn)"),
    ],
)
def test_other_partial_results_are_refused(old: str, new: str) -> None:
    assert old in MIXED
    with pytest.raises(NotUnderstood):
        read_wrapper(MIXED.replace(old, new))


def test_final_reductions_become_launches_of_small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_reductions, "example_rows", torch.empty)
    asked: list[torch.fx.GraphModule] = []

    def lower(graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Any:
        asked.append(graph)
        rows = torch.randn(8, 64)
        assert torch.allclose(graph(rows)[0].float(), rows.sum(0), atol=0.1)
        assert inputs[0].shape == (8, 64)
        small = SMALL
        if len(asked) == 2:
            small = small.replace("(1, ), torch.float32", "(1, ), torch.bfloat16")
        return read_wrapper(small), {"triton_a": f"a{len(asked)}", "triton_b": f"b{len(asked)}"}

    text, kernels = with_launches(read_wrapper(MIXED), {"triton_mixed": "m"}, lower)  # type: ignore[dict-item]
    assert [call.kernel for call in text.calls if isinstance(call, Launched)] == [
        "triton_mixed",
        "final 0 triton_a",
        "final 0 triton_b",
        "final 1 triton_a",
        "final 1 triton_b",
    ]
    assert set(kernels.values()) == {"m", "a1", "b1", "a2", "b2"}
    read, written = text.calls[3].arguments[:2]  # type: ignore[union-attr]
    workspace = text.calls[0].arguments[2]  # type: ignore[union-attr]
    assert isinstance(read, Value)
    assert isinstance(workspace, Value)
    assert (read.root, read.offset) == (workspace.root, 512)
    assert isinstance(written, Value)
    assert written.root in text.scratch()
    assert text.calls[4].arguments[1] == text.outputs[2]  # type: ignore[union-attr]
    assert len(text.scratch()) == 3  # the workspace, and one for each small graph


class Job(CudaJob):
    """A job whose steps are told: the first kernel does not prove, one with sums apart does."""

    def __init__(self, *, mixes: bool) -> None:
        self.clock = Clock()
        self._mixes = mixes
        self.forms: list[str] = []

    def _make_form(self, call: Any, natives: Any, graph: Any, form: Form) -> Any:
        self.forms.append(form.name)
        made = CudaLowered(None, None, self._mixes)  # type: ignore[arg-type]
        return form.name, made

    def _prove(self, call: Any, probe: Any, natives: Any, kernel: Any) -> Any:
        if kernel == "first":
            raise ProofFailed("an error of 9 ulp, 8 allowed")
        return kernel


def test_sums_are_taken_apart_where_those_of_one_kernel_do_not_prove(tmp_path: Path) -> None:
    def proved(job: Job) -> Any:
        job._directory = tmp_path
        return job._prove_first(None, None, [], None, lambda: None)  # type: ignore[arg-type]

    mixed = Job(mixes=True)
    assert proved(mixed) == "apart"
    assert mixed.forms == ["first", "apart"]
    with pytest.raises(ProofFailed):
        proved(Job(mixes=False))


@pytest.mark.parametrize(
    ("again", "how", "fact", "searches"),
    [
        ("search", "quick", "due", True),
        ("search", "quick", "done", False),
        (None, "quick", "due", False),
        (None, "deep", "due", True),
        (None, "deep", "done", False),
        (1, "quick", "due", False),  # to be measured again
    ],
)
def test_a_stored_kernel_is_searched_once_and_where_it_is_asked_for(
    again: Any, how: str, fact: str, searches: bool
) -> None:
    job = Job(mixes=False)
    job.request, job.description = {"search": how}, {"again": again}
    assert job._searches({"kind": "kernel", "facts": {"search": fact}}) is searches
    assert not job._searches({"kind": "kernel", "facts": {}})
