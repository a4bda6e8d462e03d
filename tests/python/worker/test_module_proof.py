"""How far a whole module's kernel may be off: by what the forward is, or moves by."""

from __future__ import annotations

import pytest
import torch
from eagercache.callables.module_transfer import Transferred, pack, unpack
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.modules.comparison import Moved, compare
from torch import nn

# Largest value 1, so that a unit is 2 ** -23.
REFERENCE = torch.linspace(-1, 1, 101, dtype=torch.float64)
LENGTH = 64  # log2 of it: 6 ulps are free


def off_by(ulps: float) -> torch.Tensor:
    """The reference with one element off."""
    values = REFERENCE.to(torch.float32)
    values[7] += ulps * 2.0**-23
    return values


def test_twice_the_forwards_error_and_a_sums_bound_are_free() -> None:
    native = REFERENCE.to(torch.float32)
    compare(off_by(5), native, REFERENCE, LENGTH, "here")
    compare(off_by(19), off_by(10), REFERENCE, LENGTH, "here")


def test_beyond_it_counts_what_the_forward_moves_by() -> None:
    native, asked = REFERENCE.to(torch.float32), []

    def moved(ulps: float) -> list[torch.Tensor]:
        asked.append(ulps)
        return [native, off_by(ulps)]

    compare(off_by(100), native, REFERENCE, LENGTH, "here", lambda: moved(26))
    assert asked == [26, 26]  # the largest error, and the root mean square
    with pytest.raises(ProofFailed, match=r"off by 99.9 ulp.*, 23.9 \(here\)"):
        compare(off_by(100), native, REFERENCE, LENGTH, "here", lambda: moved(24))
    compare(off_by(5), native, REFERENCE, LENGTH, "here", lambda: moved(0))
    assert 0 not in asked


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_what_is_compared_in_parts_is_judged_as_a_whole(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagercache.calls.numerics._AT_ONCE", at_once)
    native, mine = off_by(3), off_by(5)
    mine[50], native[50] = torch.nan, torch.nan
    found = compare(mine, native, REFERENCE, LENGTH, "here")
    assert found == (pytest.approx(5.0, abs=0.2), pytest.approx(3.0, abs=0.2))
    with pytest.raises(ProofFailed, match=r"off by 99.9 ulp, the forward by 2.88, 3.88 \(here\)"):
        compare(off_by(100), off_by(3), REFERENCE, LENGTH, "here", lambda: [off_by(4)])
    with pytest.raises(ProofFailed, match="NaN or infinity"):
        compare(off_by(3), native, REFERENCE, LENGTH, "here")
    nothing = torch.full_like(native, torch.nan)
    assert compare(nothing, nothing, REFERENCE, LENGTH, "here") == (0.0, 0.0)


def test_a_forward_that_overflows_when_moved_allows_nothing() -> None:
    native = REFERENCE.to(torch.float32)
    endless = torch.full_like(native, float("inf"))
    with pytest.raises(ProofFailed):
        compare(off_by(100), native, REFERENCE, LENGTH, "here", lambda: [endless])


class Rectified(nn.Module):
    """Its gradient jumps where the sum is rounded to the other side of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum().relu()


def test_everything_that_a_call_is_given_moves_by_its_last_place_and_comes_back() -> None:
    model = Rectified()
    rebuilt: Transferred = unpack(pack(model, (torch.ones(3),), {}))
    rebuilt.draw(seed=0)
    before = [tensor.clone() for tensor in (rebuilt.module.weight.detach(), rebuilt.args[0])]
    seen: list[list[torch.Tensor]] = []

    def call() -> list[torch.Tensor | None]:
        seen.append([rebuilt.module.weight.detach().clone(), rebuilt.args[0].clone()])
        return [rebuilt.module(*rebuilt.args)]

    moved = Moved(rebuilt, call, lambda: rebuilt.draw(seed=0))
    assert len(moved.of(0)) == len(seen) == 3
    assert len(moved.of(0)) == len(seen)  # not called again
    for values in seen:
        for value, old in zip(values, before, strict=True):
            steps = (value - old).abs() / (old.abs() * torch.finfo(old.dtype).eps)
            assert bool((steps > 0).all()) and bool((steps <= 2).all())
    assert len({tuple(torch.cat(values).tolist()) for values in seen}) == 3
    assert torch.equal(rebuilt.args[0], before[1])
