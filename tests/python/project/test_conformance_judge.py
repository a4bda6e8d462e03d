"""What conformance finds in two answers, and what it lets pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.database import BackendCall
from conformance.items import backend_item
from conformance.judge import Observation, compare, observe, without_memory
from conformance.magnitudes import magnitudes, moves
from conformance.reference import differences
from conformance.wider import Wider


def _seen(good: Callable[[Any], Any], bad: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    problems = compare(observe(good, make()), observe(bad, make()), None)
    return "; ".join(problems)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _bumped(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    made.add_(0)
    return made


def _written(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    x.view(-1)[0] = 7
    return made


def _raises(text: str) -> Callable[[Any], Any]:
    def call(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(text)

    return call


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (lambda x: x * 3, "element 0"),
        (lambda x: (x * 2).t().contiguous().t(), "strides"),
        (lambda x: (x * 2).double(), "dtype"),
        (lambda x: (x * 2)[:1], "sizes"),
        (lambda x: torch.cat([x.new_zeros(1), (x * 2).view(-1)])[1:].view(x.size()), "offset"),
        (lambda x: (x * 2).requires_grad_(), "requires_grad"),
        (_bumped, "version counters"),
        (_written, "input 0 is written"),
        (lambda x: x.mul_(2), "aliasing"),
        (lambda x: [x * 2], "structure"),
        (_raises("no"), "native answers, here raises RuntimeError: no"),
    ],
)
def test_the_judge_sees(bad: Callable[[Any], Any], word: str) -> None:
    assert word in _seen(_doubled, bad, lambda: torch.arange(1.0, 7.0).view(2, 3))


def test_the_judge_sees_another_exception() -> None:
    def make() -> torch.Tensor:
        return torch.ones(2)

    assert "error" in _seen(_raises("a"), _raises("b"), make)
    assert _seen(_raises("a"), _raises("a"), make) == ""


def test_the_judge_sees_a_write_beside_a_view() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        x._base[0] = 1
        return x.add_(1)

    assert "input 0" in _seen(lambda x: x.add_(1), bad, lambda: torch.zeros(8)[2:6])


def test_the_judge_sees_inference_tensors_and_wrong_gradients() -> None:
    def inference(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x * 2

    assert "is_inference" in _seen(_doubled, inference, lambda: torch.ones(3))

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    def leaf() -> torch.Tensor:
        return torch.ones(3, requires_grad=True)

    good = observe(_doubled, leaf(), backward=True)
    bad = observe(Wrong.apply, leaf(), backward=True)
    bad.outputs = good.outputs
    assert compare(good, bad, None)


def _wider(pointwise: bool) -> Wider:
    x = torch.linspace(0.1, 3.0, 64)
    return Wider(lambda arguments: [torch.exp(arguments)], x, pointwise)


@pytest.mark.parametrize(("ulps", "found"), [(0, False), (8, True)])
def test_floats_may_err_as_their_class_promises_and_no_more(ulps: int, found: bool) -> None:
    wider = _wider(pointwise=True)

    def other(x: torch.Tensor) -> torch.Tensor:
        made = torch.exp(x.double()).float().numpy()  # rounded once, which native's is not
        made.view("int32")[5] += ulps
        return torch.from_numpy(made)

    good = observe(torch.exp, wider.arguments.clone())
    assert bool(compare(good, observe(other, wider.arguments.clone()), wider)) == found


def test_terms_without_an_answer_for_their_absolute_values_count_by_the_rest() -> None:
    x = torch.tensor([-5.3582, -float("inf"), 5.7149, 1.7728, -2.1544, 1.7195])
    weights = torch.tensor([1.0, 1.125, 1.375, 1.5, 1.125, 1.25])

    def gradient(a: torch.Tensor) -> list[torch.Tensor]:
        y = torch.softmax(a, 0)
        g = weights.to(a.dtype)
        return [y * (g - (g * y).sum())]

    # The largest one cancels: an error in its last places is one of the terms', not of the rest.
    wider = Wider(gradient, x, pointwise=False, composed=True)
    (good,) = gradient(x)
    off = good.clone()
    off[2] += 1e-7
    assert differences([good], [off], wider) == []
    off[2] += 2e-4
    assert differences([good], [off], wider)


def test_a_loss_is_measured_by_its_terms() -> None:
    x = torch.tensor([-5.1, 2.5, -2.75, -5.16, 1.0, 1.0])
    y = torch.tensor([1.0, -2.0, 3.0, 1.0, -2.0, 3.0])
    func = torch.ops.aten.binary_cross_entropy_with_logits.default
    wider = backend_item(BackendCall(func, (x, y), {}), 0).wider
    assert wider is not None
    wide = ((x.double(), y.double()), {})
    (size,) = magnitudes(wider, wide, wider.compute(wide), False)
    terms = func(*wide[0], reduction=0)
    assert size is not None
    assert float(size) == pytest.approx(float(terms.abs().mean()))
    assert float(size) > 1.1 * float(terms.mean())


def test_the_rest_of_two_large_terms_beside_small_elements_is_measured_by_its_own() -> None:
    """As CUDA's kernel and CUDA's native answered; native on the CPU is off by 1.3e-7."""
    grad = torch.tensor([1.0, 1.125, 1.25, 1.375, 1.5])
    y = torch.tensor([3.81560449e-06, 0.937160313, 0.00691427290, 0.0558698252, 5.17466105e-05])
    func = torch.ops.aten._softmax_backward_data.default
    wider = backend_item(BackendCall(func, (grad, y, 0, torch.float32), {}), 0).wider
    native = func(grad.double(), y.double(), 0, torch.float64).float()
    native[1] -= 1.6e-8
    here = native.clone()
    here[1] += 1.12e-7
    notes: list[str] = []
    assert differences([native], [here], wider, notes) == []
    assert [note.partition(":")[0] for note in notes] == ["ill-conditioned"]
    here[1] += 2.5e-7
    assert differences([native], [here], wider)
    here = native.clone()
    here[3] += 1.12e-7  # its own terms are small
    assert differences([native], [here], wider)


def test_what_empty_makes_is_nobodys_but_not_its_metadata() -> None:
    def made(value: float, size: int = 3) -> Observation:
        return observe(lambda a: a.new_full((size,), value), torch.ones(2))

    assert compare(made(1.0), made(2.0), None)
    assert compare(made(1.0), made(2.0), None, values=False) == []
    assert compare(made(1.0), made(1.0, size=4), None, values=False)


@pytest.mark.parametrize(("momentum", "off", "found"), [(0.0, 0.0, False), (0.5, 2**-4, True)])
def test_statistics_may_be_as_accurate_as_an_answer(
    momentum: float, off: float, found: bool
) -> None:
    def native(arguments: Any) -> Any:
        x, mean = arguments
        mean.copy_(torch.stack([mean * (1 - momentum) + x.mean() * momentum] * 3).sum(0) / 3)
        return x - 1

    def mine(arguments: Any) -> Any:
        x, mean = arguments
        mean.copy_(mean * (1 - momentum) + x.mean() * momentum + off)
        return x - 1

    def make() -> list[torch.Tensor]:
        return [torch.tensor([0.5, 0.25]), torch.tensor([5.7, 1.4534956])]

    def compute(arguments: Any) -> list[torch.Tensor]:
        return observe(native, [t.clone() for t in arguments]).all_values()

    wider = Wider(compute, make(), pointwise=False, statistics=True)
    good, bad = observe(native, make()), observe(mine, make())
    assert good.written and bool(bad.written) == bool(momentum)
    assert bool(compare(good, bad, wider)) == found


def test_functions_of_integers_have_a_wider_reference() -> None:
    x = torch.arange(-9, 10)
    wider = Wider(lambda a: [torch.special.log_ndtr(a)], x, pointwise=True)
    right = torch.special.log_ndtr(x.double()).float()  # native is off by 12 ulp at 7
    assert differences([torch.special.log_ndtr(x)], [right], wider) == []
    assert differences([right], [right * (1 + 2**-15)], wider)


def test_of_one_number_every_draw_of_roundings_counts() -> None:
    def rest(a: torch.Tensor) -> list[torch.Tensor]:
        return [a.exp() - a.log1p() - a.cosh()]

    x = torch.tensor([0.75])
    wider = Wider(rest, x, pointwise=True, composed=True)
    terms = [float(torch.exp(x)), float(torch.log1p(x)), float(torch.cosh(x))]
    root = math.sqrt(sum(term**2 for term in terms))
    (reference,) = wider.compute(x.double())
    (size,) = moves(wider, x.double(), [reference])
    # The last place of the terms, not what two of them happen to leave of it.
    assert 0.7 * root < size < 1.5 * root


def test_steps_in_half_precision_may_round_as_natives_do_and_no_more() -> None:
    x = torch.linspace(0.5, 8.0, 16).bfloat16()

    def cubed(a: torch.Tensor) -> list[torch.Tensor]:
        return [a.rsqrt().pow(3) * -0.5]

    wider = Wider(cubed, x, pointwise=False, composed=True)
    notes: list[str] = []
    (good,) = cubed(x)
    once = x.float().rsqrt().bfloat16().float().pow(3).bfloat16() * -0.5
    assert differences([good], [once], wider, notes) == []
    assert differences([good], [good * 1.05], wider)


def test_no_excuse_grows_with_natives_largest_errors() -> None:
    # Native is off by hundreds of units where a square is nearly one, as some of those drawn are.
    x = torch.full((64,), 0.7)
    wider = Wider(lambda a: [a * a - 1], x, pointwise=True)
    right = (x.double().square() - 1).float()
    assert differences([x * x - 1], [right], wider) == []
    assert differences([x * x - 1], [right * (1 + 2**-17)], wider)


def test_numbers_that_are_only_moved_must_be_natives_whatever_their_squares() -> None:
    x = torch.tensor([3e38, -1.5, 2.0, math.inf, 7.0])
    wider = Wider(lambda a: [a.roll(1)], x, pointwise=False)
    assert differences([x.roll(1)], [x.roll(2)], wider)
    total = Wider(lambda a: [a.square().cumsum(0)], x, pointwise=False)
    made = x.square().cumsum(0)
    assert differences([made], [made.clone().clamp(max=3e38)], total) == []


def test_an_operator_of_probabilities_has_a_wider_reference_up_to_one() -> None:
    p = torch.tensor([0.998, 1.0, 0.0, 0.37]).bfloat16()
    target = p.flip(0)
    wider = Wider(
        lambda given: [torch.nn.functional.binary_cross_entropy(*given)],
        (p, target),
        pointwise=False,
        composed=True,
    )
    loss = torch.nn.functional.binary_cross_entropy(p, target)
    assert differences([loss], [loss * (1 + 2**-8)], wider) == []
    assert differences([loss], [loss * 2], wider)


def test_values_count_where_only_natives_memory_is_another_one_each_time() -> None:
    def with_rest(rest: float, value: float = 1.0) -> Observation:
        memory = torch.tensor([value, rest])
        return observe(lambda a: a[:1].clone(), memory)

    again = [with_rest(2.0), with_rest(3.0)]
    assert without_memory(with_rest(1.0), with_rest(4.0), again, None) == []
    assert without_memory(with_rest(1.0), with_rest(4.0, 5.0), again, None)
    assert without_memory(with_rest(1.0), with_rest(4.0, 5.0), [with_rest(1.0, 6.0)], None) == []


def test_an_answer_without_a_wider_reference_is_held_to_what_last_places_move() -> None:
    x = torch.linspace(0.5, 8, 16)

    def narrow(given: Any) -> list[torch.Tensor]:
        if given[0].dtype == torch.float64:
            raise RuntimeError("only float32")
        return [given[0] - given[0].mean()]

    for composed in (True, False):
        wider = Wider(narrow, (x,), pointwise=False, composed=composed)
        (made,) = narrow((x,))
        notes: list[str] = []
        assert bool(differences([made], [made + 2e-7], wider, notes)) is not composed
        assert bool(notes) is composed
        assert differences([made], [made + 1e-4], wider)
        assert differences([made], [made * float("nan")], wider)


def test_inputs_that_only_other_numbers_change_are_compared_too() -> None:
    def add_norm(arguments: Any) -> Any:
        x, mean = arguments
        mean.mul_(0.9).add_(x.mean() * 0.1)
        return x - mean

    def compute(arguments: Any) -> list[torch.Tensor]:
        made = observe(add_norm, [t.clone() for t in arguments])
        return made.all_values()

    def make() -> list[torch.Tensor]:
        return [torch.tensor([0.5, 0.25]), torch.tensor([0.375])]

    # In float32 the mean stays as it is; with other numbers it does not.
    wider = Wider(compute, make(), pointwise=False, composed=True)
    good = observe(add_norm, make())
    assert compare(good, observe(lambda a: add_norm(a) * (1 + 2**-23), make()), wider) == []
    assert compare(good, observe(lambda a: add_norm(a) * 1.01, make()), wider)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_integers_booleans_and_double_precision_are_bitwise(dtype: torch.dtype) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        made = x.clone().double()
        made[3] = torch.nextafter(made[3], made[3] + 9) if dtype == torch.float64 else 0
        return made.to(dtype).clone()

    text = _seen(lambda x: x.clone(), other, lambda: torch.ones(5).to(dtype))
    assert "not equal bit for bit" in text


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.0])
def test_nan_infinity_and_the_sign_of_zero_count(wrong: float) -> None:
    x = torch.zeros(4)
    wider = Wider(lambda a: [a.clone()], x, pointwise=True)

    def other(a: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, wrong, 0.0, 0.0])

    assert compare(observe(torch.clone, x.clone()), observe(other, x.clone()), wider)


def test_what_is_looked_at_is_no_part_of_the_call() -> None:
    entered = []

    class Around(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            return None

    observe(_doubled, torch.ones(3), around=Around())
    assert entered == [1]
