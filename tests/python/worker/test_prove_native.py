"""Whether a kernel equals native where native raises, warns or answers twice; probes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Program
from eagercache.calls.call import Call
from eagercache.calls.numerics import (
    CannotProve,
)
from eagercache.worker.validation import native_errors
from eagercache.worker.validation.native import native_answers
from eagercache.worker.validation.native_errors import AnswersErrors, must_raise_too
from test_calls import NONE, describe, integer, integers, tensor
from test_prove import PlayedCall, PlayedProbe, proof_of


def test_native_that_raises_on_everything_cannot_be_compared() -> None:
    with pytest.raises(CannotProve, match="native raises on made-up data"):
        description = describe("square", tensor((3,), (1,)))
        arguments = [tensor((3, 4)), tensor((5,))]
        native_answers(Call(description | {"op": "aten::mv", "args": arguments}))


def filled(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, value.to(x.dtype), x)


FILLED = describe("masked_fill.Tensor", tensor((40,), dtype="float16"),
                  tensor((40,), dtype="bool"), tensor((), dtype="float32"))  # fmt: skip


def test_a_kernel_may_not_answer_where_native_raises() -> None:
    with pytest.raises(AnswersErrors):
        proof_of(FILLED, filled)  # native: cannot be converted to Half without overflow
    single = {**FILLED, "args": [tensor((40,)), *FILLED["args"][1:]]}
    assert proof_of(single, filled).numerics == "bitwise"

    def entropy(x: torch.Tensor, target: torch.Tensor, *_: Any) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy
        return loss(*(t.nan_to_num(0.0).clamp(0, 1) for t in (x, target)), reduction="none")

    loss = describe("binary_cross_entropy", tensor((300,)), tensor((300,)), NONE, integer(0))
    with pytest.raises(AnswersErrors, match="normal data"):
        proof_of(loss, entropy)  # native: all elements of input should be between 0 and 1


def test_the_ends_of_a_dtype_are_tried_on_few_numbers() -> None:
    call = PlayedCall(FILLED)
    probe, good = PlayedProbe(call), call.sample("ones", 0)
    call.kernel = filled
    with pytest.raises(AnswersErrors, match="largest number"):
        must_raise_too(call, probe, good, ())

    def declines(*_: Any) -> torch.Tensor:
        raise RuntimeError("not for a kernel")

    call.kernel = declines
    must_raise_too(call, probe, good, [("extreme", 1)])
    assert not call.forced  # the next call is nobody's


def test_beside_tensors_on_a_gpu_only_numbers_on_the_host_are_tried() -> None:
    call = Call(FILLED)
    good = call.sample("ones", 0)

    def move(*indices: int) -> int:
        for index in indices:
            call.tensors[index] = replace(call.tensors[index], device="cuda:0")
        return len(list(native_errors._suspects(call, good, ())))

    assert (move(), move(0, 1), move(2)) == (4, 4, 0)
    few = Call({**FILLED, "args": [tensor((4,)), tensor((4,), dtype="bool"), tensor(())]})
    good = few.sample("ones", 0)
    few.tensors[0] = replace(few.tensors[0], device="cuda:0")
    for _, sample in native_errors._suspects(few, good, ()):
        assert torch.equal(sample.values[0], torch.ones(4))  # it is on the GPU


def test_undefined_outputs_cannot_be_compared() -> None:
    description = describe(
        "native_layer_norm_backward",
        tensor((4, 8)), tensor((4, 8)), integers(8), tensor((4, 1)), tensor((4, 1)), NONE, NONE,
        {"kind": "bool_list", "values": [True, False, False]},
    )  # fmt: skip
    with pytest.raises(CannotProve, match="undefined tensor"):
        native_answers(Call(description))


def test_native_that_changes_its_mind_cannot_be_compared() -> None:
    description = describe("bernoulli", tensor((50,)), NONE)
    with pytest.raises(CannotProve, match="differ from run to run"):
        native_answers(Call(description))


def test_a_probe_takes_the_place_of_one_that_lies_about(program: Program) -> None:
    result = program(
        """
        import weakref
        import torch
        from eagercache.base.load import core
        names = ("aten::var", "correction", "CPU")
        core.register(*names)
        probes, inputs, seen = [], [], []
        for _ in range(2):
            probes.append(core.Probe(*names))
            probes[-1].capture()
            x = torch.ones(4, 3)
            inputs.append(weakref.ref(x))
            torch.var(x, 1)
            del x
            seen.append([[probe.captured for probe in probes], [i() is not None for i in inputs]])
        report(seen=seen)
        """
    )
    assert result["seen"] == [[[True], [True]], [[False, True], [False, True]]]


def test_a_probe_that_another_thread_lets_go_is_destroyed_by_its_own(program: Program) -> None:
    result = program(
        """
        import threading
        import weakref
        import torch
        from eagercache.base.load import core
        names = ("aten::var", "correction", "CPU")
        core.register(*names)
        x = torch.ones(4, 3)
        taken = weakref.ref(x)
        probes = [core.Probe(*names)]
        probes[0].capture()
        torch.var(x, 1)
        del x
        thread = threading.Thread(target=probes.clear)
        thread.start()
        thread.join()
        seen = [taken() is not None]
        for _ in range(3):
            probe = core.Probe(*names)
            probe.capture()
            torch.var(torch.ones(4, 3), 1)
            seen.append(probe.captured and taken() is None)
        report(seen=seen)
        """
    )
    assert result["seen"] == [True] * 4


def test_native_that_warns_cannot_be_stood_in_for(program: Program) -> None:
    result = program(
        """
        import torch
        from eagercache.worker.validation import native_errors
        from eagercache.calls import numerics
        from eagercache.worker.validation import validate
        from eagercache.calls.samples import Sample
        from eagercache.calls.numerics import CannotProve
        from eagercache.base.load import core
        core.register("aten::var", "correction", "CPU")
        probe = core.Probe("aten::var", "correction", "CPU")
        class Rebuilt:
            def invoke(self, values):
                return [torch.ops.aten.var.correction(values[0], [1], correction=1)]
        texts = []
        for columns in (3, 1):
            try:
                sample = Sample([torch.ones(4, columns)], [])
                validate.capture(Rebuilt(), probe, sample, "faster")
                texts.append("")
            except CannotProve as error:
                texts.append(str(error))
        report(texts=texts)
        """
    )
    assert result["texts"][0] == ""
    assert "native warns" in result["texts"][1] and "degrees of freedom" in result["texts"][1]
