"""What stands for exact numbers where a forward names a dtype itself."""

from __future__ import annotations

import pytest
import torch
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.modules.proof import in_float64, wide_copy


def test_casts_by_name_are_to_float64() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(8, 8).double(), torch.randn(4, 8).double()

    def forward() -> torch.Tensor:
        steps = torch.arange(8).float().exp() + torch.ones(8, dtype=torch.float32)
        return linear(x.float() * steps.to(torch.bfloat16).reciprocal())

    made = in_float64(forward)
    steps = torch.arange(8).double().exp() + 1.0
    assert made.dtype == torch.float64
    torch.testing.assert_close(made, linear(x / steps), rtol=1e-14, atol=1e-14)


def test_the_least_number_of_a_dtype_fits_into_what_is_made_of_it() -> None:
    scores, hidden = torch.randn(4, 8).double(), torch.rand(4, 8) > 0.5
    hidden[:, 0] = False  # softmax of nothing is no number

    def forward() -> torch.Tensor:
        least = torch.full((), torch.finfo(scores.dtype).min)  # of the default dtype
        return torch.where(hidden, least, scores).softmax(-1)

    made = in_float64(forward)
    torch.testing.assert_close(made, scores.masked_fill(hidden, -float("inf")).softmax(-1))
    assert torch.get_default_dtype() == torch.float32


def test_a_copy_that_a_reference_makes_of_a_module_is_whole() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    made = in_float64(lambda: wide_copy(module)(torch.ones(4, 8)))
    torch.testing.assert_close(made, module(torch.ones(4, 8)).double())


def test_what_writes_narrow_numbers_has_no_reference() -> None:
    linear, kept = torch.nn.Linear(8, 8).double(), torch.zeros(4, 8)

    with pytest.raises(ProofFailed, match="narrow"):
        in_float64(lambda: linear(kept.add_(1.0)))


def test_an_error_of_the_forward_is_no_reference() -> None:
    linear = torch.nn.Linear(8, 8).double()

    with pytest.raises(ProofFailed, match="no wider reference"):
        in_float64(lambda: linear(torch.ones(4, 9)))


@pytest.mark.parametrize("on", [1, 2])
def test_memory_that_ran_out_says_nothing_of_the_kernel(on: int) -> None:
    calls = []

    def forward() -> torch.Tensor:
        calls.append(on)
        if len(calls) == on:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        raise RuntimeError("expected another dtype")

    with pytest.raises(torch.OutOfMemoryError):
        in_float64(forward)
    assert len(calls) == on
