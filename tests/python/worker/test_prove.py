"""What passes for native's equal, and what for faster. The probe is played by Python functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagercache.calls.call import Call
from eagercache.calls.numerics import (
    NotBitwise,
    ProofFailed,
    Tolerance,
    compare_with_reference,
)
from eagercache.calls.samples import FILLS
from eagercache.worker.samples.draws import SEED
from eagercache.worker.validation import tolerances, validate, written
from eagercache.worker.validation.accuracy import _magnitudes
from eagercache.worker.validation.native import native_answers
from eagercache.worker.validation.tolerances import tolerance_of
from test_calls import NONE, boolean, describe, integer, integers, number, tensor

Kernel = Callable[..., Any]


class PlayedCall(Call):
    """A call whose next forced invocation is answered by a Python function, as a kernel would."""

    kernel: Kernel
    forced = answered = False

    def invoke(self, values: Any) -> list[Any]:
        if self.forced:
            self.forced = False
            result = self.kernel(*values)
            self.answered = True
            return list(result) if isinstance(result, (tuple, list)) else [result]
        return super().invoke(values)


class PlayedProbe:
    def __init__(self, call: PlayedCall) -> None:
        self._call = call
        self.captured = True
        self.aside = self.error = self.warning = ""

    @property
    def forced(self) -> bool:
        return self._call.answered

    def force(self) -> None:
        self._call.forced, self._call.answered = True, False

    def capture(self) -> None:
        self.captured, self._call.forced = True, False

    def load(self, path: str) -> None:
        raise AssertionError(path)

    def digest(self, choose: str) -> str:
        return choose

    def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
        raise AssertionError((pairs, calls))


def proof_of(description: dict[str, Any], kernel: Kernel) -> validate.Proof:
    call = PlayedCall(description)
    call.kernel = kernel
    return validate.prove(call, PlayedProbe(call), native_answers(call))


SIN = describe("sin", tensor((40, 50)))


def test_equal_bits_are_bitwise() -> None:
    proof = proof_of(SIN, torch.sin)
    assert proof.numerics == "bitwise" and len(proof.fills) == len(FILLS)
    assert (proof.largest_error, proof.seed) == (0.0, SEED)


def test_what_becomes_of_zeros_of_either_sign_must_be_natives() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, y) + 0.0  # of two negative zeros it makes a positive one

    with pytest.raises(ProofFailed, match="another sign of zero"):
        proof_of(describe("maximum", tensor((4,)), tensor((4,))), kernel)


def test_pairs_of_special_values_are_met_on_few_elements_too() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.floor(x / y)  # native's -1.25 by infinity is -1

    with pytest.raises(ProofFailed, match="special data"):
        proof_of(describe("floor_divide", tensor((3,)), tensor((3,))), kernel)


def test_which_of_zeros_of_either_sign_is_the_largest_is_tried_more_than_once() -> None:
    def kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
        largest = torch.amax(x)
        positive = bool(((x == 0) & ~torch.signbit(x)).any())
        return largest.abs() if largest == 0 and positive else largest  # native takes either

    call = PlayedCall(describe("amax", tensor((2, 3, 4), (12, 1, 3)), integers(), boolean(False)))
    call.kernel = kernel
    proof = validate.prove(call, PlayedProbe(call), native_answers(call), reduces=True)
    assert proof.numerics == "accurate"


def test_the_tails_of_an_exponential_are_compared() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.where((x < -9) & (x > -1e3), -0.0, torch.nn.functional.silu(x))

    with pytest.raises(ProofFailed, match="wide data"):
        proof_of(describe("silu", tensor((64,))), kernel)


def test_a_sum_in_another_order_is_not_bitwise_though_rounding_hides_it() -> None:
    def kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
        total = torch.zeros(x.size(0))
        for column in reversed(x.float().unbind(-1)):
            total = total + column
        return total.to(x.dtype)

    call = PlayedCall(
        describe("sum.dim_IntList", tensor((18, 6), dtype="bfloat16"), integers(-1), boolean(False),
                 NONE)
    )  # fmt: skip
    call.kernel = kernel
    proof = validate.prove(call, PlayedProbe(call), native_answers(call), reduces=True)
    assert proof.numerics == "accurate"


@pytest.mark.parametrize("listed", [True, False])
def test_an_operator_that_adds_up_has_the_bound_of_sums_whatever_its_kernels_text(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.sum(-1) * (1 + 5 * torch.finfo(x.dtype).eps)

    if not listed:
        others = tolerances._ACCUMULATING - {"sum"}
        monkeypatch.setattr(tolerances, "_ACCUMULATING", others)
    described = describe("sum.dim_IntList", tensor((16, 4096)), integers(-1), boolean(False), NONE)
    if listed:
        assert proof_of(described, kernel).numerics == "accurate"
    else:
        with pytest.raises(ProofFailed):
            proof_of(described, kernel)


def test_operators_that_are_said_to_add_up_exist() -> None:
    missing = [name for name in tolerances._ACCUMULATING if not hasattr(torch.ops.aten, name)]
    assert not missing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_sum_is_never_called_bitwise(dtype: str) -> None:
    call = PlayedCall(
        describe(
            "sum.dim_IntList", tensor((40, 6), dtype=dtype), integers(-1), boolean(False), NONE
        )
    )
    call.kernel = lambda x, *_: x.sum(-1)
    proof = validate.prove(call, PlayedProbe(call), native_answers(call))
    assert proof.numerics == ("bitwise" if dtype == "float32" else "accurate")
    assert proof.largest_error == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_function_that_differs_in_float32_is_never_called_bitwise(dtype: str) -> None:
    how = {"kind": "string", "value": "tanh"}
    call = PlayedCall(describe("gelu", tensor((40, 6), dtype=dtype), how))
    call.kernel = lambda x, *_: torch.nn.functional.gelu(x, approximate="tanh")
    natives = native_answers(call)
    proof = validate.prove(call, PlayedProbe(call), natives, approximates=True)
    assert proof.numerics == ("bitwise" if dtype == "float32" else "accurate")


def test_a_rounded_sum_that_is_written_is_natives() -> None:
    call = PlayedCall(
        describe("sum.IntList_out", tensor((40, 6), dtype="bfloat16"), integers(-1), boolean(False),
                 NONE, tensor((40,), dtype="bfloat16"))
    )  # fmt: skip
    call.kernel = lambda x, d, k, t, out: torch.sum(x, -1, out=out)
    with pytest.raises(NotBitwise, match="by luck at best"):
        validate.prove(call, PlayedProbe(call), native_answers(call))


def test_running_statistics_may_be_as_accurate_as_a_rounded_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written, "writes_statistics", lambda call: True)  # as on CUDA
    features = [tensor((3,)) for _ in range(4)]
    call = PlayedCall(
        describe("native_batch_norm", tensor((8, 3, 4, 4), dtype="bfloat16"), *features,
                 boolean(True), number(0.1), number(1e-5))
    )  # fmt: skip
    call.kernel = lambda *tensors: torch.native_batch_norm(*tensors, True, 0.1, 1e-5)
    proof = validate.prove(call, PlayedProbe(call), native_answers(call))
    assert proof.numerics == "accurate" and call.written


def test_a_kernel_that_does_not_look_at_weights_fails() -> None:
    call = PlayedCall(
        describe("native_layer_norm", tensor((4, 8)), integers(8), tensor((8,)), NONE, number(1e-5))
    )
    call.kernel = lambda x, weight: torch.native_layer_norm(x, [8], weight, None, 1e-5)
    with pytest.raises(ProofFailed, match="must leave to native"):
        validate.prove(call, PlayedProbe(call), native_answers(call))


def test_a_rounded_function_that_is_written_is_natives() -> None:
    half = tensor((33, 8), (16, 2), dtype="float16")
    call = PlayedCall(describe("atan2_", half, tensor((33, 8))))
    call.kernel = lambda x, y: x.atan2_(y)
    with pytest.raises(NotBitwise, match="by luck at best: a rounded function"):
        validate.prove(call, PlayedProbe(call), native_answers(call), approximates=True)


def test_integers_are_past_what_half_precision_holds() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.float() * y.float()).to(y.dtype)  # native rounds the integer first

    description = describe(
        "mul.Tensor", tensor((64,), None, "int32"), tensor((64,), None, "bfloat16")
    )
    assert proof_of(description, kernel).numerics == "accurate"


def test_a_short_sum_of_negative_zeros_is_of_either_sign() -> None:
    def kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x[:, 0] + x[:, 1] + x[:, 2]  # native begins at zero

    call = PlayedCall(
        describe("sum.dim_IntList", tensor((64, 3)), integers(-1), boolean(False), NONE)
    )
    call.kernel = kernel
    proof = validate.prove(call, PlayedProbe(call), native_answers(call))
    assert proof.numerics == "accurate"


def test_a_longer_sum_of_negative_zeros_alone_is_tried() -> None:
    def kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return functools.reduce(torch.add, x.unbind(-1))  # native begins at zero

    call = PlayedCall(
        describe("sum.dim_IntList", tensor((4, 9)), integers(-1), boolean(False), NONE)
    )
    call.kernel = kernel
    proof = validate.prove(call, PlayedProbe(call), native_answers(call))
    assert proof.numerics == "accurate"
    assert "negative_zeros" in proof.fills


def test_what_is_accumulated_in_double_is_never_called_bitwise() -> None:
    call = PlayedCall(
        describe("var.correction", tensor((40, 6)), integers(-1), integer(1), boolean(False))
    )
    call.kernel = lambda x, *_: torch.var(x, -1, correction=1)
    proof = validate.prove(call, PlayedProbe(call), native_answers(call))
    assert proof.numerics == "accurate"


def test_the_neighbouring_number_is_accurate() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.double()).float()

    proof = proof_of(SIN, kernel)
    assert proof.numerics == "accurate"
    assert 0.0 < proof.largest_error <= 1.0


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (lambda x: torch.sin(x) * 1.00001, "error of .* ulp, .* allowed"),
        (lambda x: torch.sin(x) * (1 + 3 * 2**-23), "error of .* ulp, .* allowed"),
        (lambda x: torch.sin(x).index_fill(1, torch.tensor(7), 0.5), "error of|NaN|sign"),
        (lambda x: torch.sin(x).nan_to_num(0.0), "NaN or infinity"),
        (lambda x: torch.sin(x) + 0.0, "sign of zero"),
        (lambda x: torch.sin(x).double(), "dtype torch.float64, native gives torch.float32"),
        (lambda x: torch.sin(x)[:, :49], "sizes"),
        (lambda x: torch.sin(x).t().contiguous().t(), "strides"),
        (lambda x: torch.cat([x.new_zeros(1, 50), torch.sin(x)])[1:], "storage offset"),
        (lambda x: torch.sin(x).requires_grad_(), "requires_grad"),
        (lambda x: x.sin_(), "tensor argument 0 was written to"),
        (lambda x: None, "output 0 is undefined"),
        (lambda x: (torch.sin(x), x.clone()), "2 outputs, native gives 1"),
    ],
)
def test_a_difference_is_found_and_named(kernel: Kernel, expected: str) -> None:
    with pytest.raises(ProofFailed, match=expected):
        proof_of(SIN, kernel)


def test_an_output_that_is_the_argument_is_found() -> None:
    description = describe("clone", tensor((4, 5)), NONE)
    with pytest.raises(ProofFailed, match="shares memory with an argument"):
        proof_of(description, lambda x: x)


def test_outputs_that_share_memory_are_found() -> None:
    description = describe("frexp.Tensor", tensor((4, 5), dtype="float32"))

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mantissa, exponent = torch.frexp(x)
        both = torch.empty(2, 4, 5)
        both[0].copy_(mantissa)
        return both[0], both.view(torch.int32)[0].copy_(exponent)

    with pytest.raises(ProofFailed, match="share memory otherwise"):
        proof_of(description, kernel)


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int32"])
def test_some_dtypes_are_bitwise_or_nothing(dtype: str) -> None:
    description = describe("square", tensor((40,), dtype=dtype))
    assert proof_of(description, lambda x: x * x).numerics == "bitwise"

    def off(x: torch.Tensor) -> torch.Tensor:
        out = x * x
        return torch.where(out == 1, out, out + (1 if dtype == "int32" else 2**-40))

    with pytest.raises(ProofFailed, match="must be equal bit for bit"):
        proof_of(description, off)


def test_a_longer_sum_may_be_as_wrong_as_native_and_no_more() -> None:
    description = describe("var.correction", tensor((16, 3000)), integers(-1), NONE, boolean(False))
    proof = proof_of(description, lambda x: x.reshape(16, 3000).clone().var(-1))
    assert (proof.numerics, proof.largest_error) == ("accurate", 0.0)

    def crude(x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(-1) - x.mean(-1) ** 2

    with pytest.raises(ProofFailed):
        proof_of(description, crude)


def test_the_sign_of_zero_counts_unless_a_sum_made_it() -> None:
    zero = torch.zeros(3)
    compare_with_reference(
        zero, -zero, zero.double(), Tolerance(reduces=True), "here", zero.double()
    )
    with pytest.raises(ProofFailed, match="sign of zero"):
        compare_with_reference(zero, -zero, zero.double(), Tolerance(), "here")


def test_a_normalised_element_near_zero_is_measured_by_the_whole_result() -> None:
    description = describe(
        "native_layer_norm", tensor((64, 512)), integers(512), NONE, NONE, number(1e-5)
    )
    call = Call(description)
    wide = call.with_wide_floats()
    x = torch.rand(64, 512, generator=torch.Generator().manual_seed(3)) + 1.0
    values = [x.double()]
    references = wide.invoke(values)
    magnitudes = _magnitudes(call, wide, values, references)
    tolerance = tolerance_of(call, references, reduces=True)
    expected = references[0].float()
    rounding = torch.full_like(expected, 2.0**-23)
    compare_with_reference(
        expected, expected + rounding, references[0], tolerance, "here", magnitudes[0]
    )
    # Another epsilon is another result, not rounding.
    other = torch.nn.functional.layer_norm(x.double(), (512,), eps=1e-4).float()
    with pytest.raises(ProofFailed, match="ulp"):
        compare_with_reference(expected, other, references[0], tolerance, "here", magnitudes[0])


# Eight of 264 are past the last 32; 64 x 40 are all in vectors.
@pytest.mark.parametrize(
    ("sizes", "strides", "numerics"),
    [
        ((33, 8), None, "accurate"),
        ((64, 40), None, "bitwise"),
        ((64, 40), (80, 2), "accurate"),
        ((200, 320), None, "accurate"),
    ],
)
def test_functions_are_bitwise_only_where_both_sides_take_vectors(
    sizes: tuple[int, ...], strides: tuple[int, ...] | None, numerics: str
) -> None:
    call = PlayedCall(describe("log", tensor(sizes, strides)))
    call.kernel = lambda x: torch.log(x)
    natives = native_answers(call)
    proof = validate.prove(call, PlayedProbe(call), natives, calls_functions=True)
    assert (proof.numerics, proof.largest_error) == (numerics, 0.0)
    others = validate.prove(call, PlayedProbe(call), natives, calls_functions=True, others=20)
    assert others.numerics == "accurate"


def test_a_function_that_is_written_is_natives_where_few_elements_tell() -> None:
    call = PlayedCall(describe("pow_.Scalar", tensor((33, 8)), number(0.001)))
    call.kernel = lambda x, y: x.pow_(y)
    with pytest.raises(NotBitwise, match="by luck at best: a rounded function"):
        validate.prove(call, PlayedProbe(call), native_answers(call), calls_functions=True)


def test_numbers_that_are_much_alike_show_a_sum_made_one_by_one() -> None:
    def kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
        total = torch.zeros(x.size(1))
        for row in x:
            total = total + row
        return total

    call = describe("sum.dim_IntList", tensor((500, 6)), integers(0), boolean(False), NONE)
    with pytest.raises(ProofFailed, match="alike data"):
        proof_of(call, kernel)


def test_overflows_of_half_precision_on_the_way_are_natives() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.float() + 3.0 * y.float()).half()  # of inf and 3 * -65504 native makes NaN

    call = describe(
        "add.Tensor",
        tensor((4, 2, 8), (32, 16, 2), dtype="float16"),
        tensor((4, 2, 8), dtype="float16"),
        number(3.0),
    )
    with pytest.raises(ProofFailed, match="all_special data"):
        proof_of(call, kernel)


def test_signs_of_zero_are_met_in_three_arguments_of_few_elements() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        answer = torch.lerp(x, y, weight)  # at the weight of 1 it makes 0.0 of -0.0
        return torch.where((weight == 1) & (y == 0) & torch.signbit(y), -0.0, answer)

    call = describe("lerp.Tensor", tensor((64,)), tensor((64,)), tensor((64,), (2,)))
    with pytest.raises(ProofFailed, match="another sign of zero"):
        proof_of(call, kernel)


def test_functions_of_few_float64_are_natives() -> None:
    few, many = (describe("log", tensor(sizes, dtype="float64")) for sizes in ((7,), (64, 64)))
    for description in (few, many):
        call = PlayedCall(description)
        call.kernel = lambda x: torch.log(x)
        natives = native_answers(call)
        if description is few:
            with pytest.raises(ProofFailed, match="rounded function of"):
                validate.prove(call, PlayedProbe(call), natives, calls_functions=True)
        else:
            proof = validate.prove(call, PlayedProbe(call), natives, calls_functions=True)
            assert proof.numerics == "bitwise"
