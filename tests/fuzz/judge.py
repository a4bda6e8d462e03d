"""Whether two answers of one operator are equal by the numerics class.

Answers that differ in some bit are computed anew, operator by operator (`Lockstep`), native and
kernel from the same arguments, and each pair of answers is held against the rule by which kernels
are validated (worker.validation): bit for bit where that is demanded, else the error
against a float64 reference. Two things that a proof's samples do not have are told apart and
counted:

"ill-conditioned": an accumulation of data whose last places alone move the result by more (the
variance of numbers far from zero and close to each other). Native often accumulates in double, and
is right where a loop in the operand's precision has lost digits. The error then counts in units of
what the result moves by when each operand moves by its last place.

"further samples": small tensors say little about native's own error, so that a kernel that is past
the rule on one is tried again on arguments moved by a few units in the last place; then the largest
errors over all of them are compared.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from conformance.database import detached_copy
from eagercache import _C
from eagercache.calls.call import Call
from eagercache.calls.numerics import ProofFailed, Tolerance, compare_with_reference, same_bits
from eagercache.calls.samples import Sample
from eagercache.runtime.session import session
from eagercache.worker.validation.accuracy import compare_values
from eagercache.worker.validation.native import Native
from eagercache.worker.validation.tolerances import accumulates, tolerance_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ROUNDS = 64
_COMPOSITE = "CompositeImplicitAutograd"


class Disagreement(Exception):
    """The answers are not equal. `str()` is `kind`, one word, and `text`, one clause."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's memory, as a tensor with a version counter of its own."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype)
    count = storage.nbytes() // tensor.element_size()
    flat.set_(storage, 0, (count,), (1,))  # type: ignore[call-overload]
    return flat


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the tensor's memory to the end of its last element."""
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()


class Lockstep(TorchDispatchMode):
    """Makes every operator call twice, native and with kernels, and compares the answers.

    Attributes:
        judged: calls whose answers differed and are within the numerics class.
        how: of those, how many needed more than the rule; see `judge`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.judged = 0
        self.how: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # inference mode shows what is elsewhere decomposed above
                return func.decompose(*args, **kwargs)
        if "empty" in func._schema.name or "zerotensor" in func._schema.name:
            return func(*args, **kwargs)  # what it holds is nobody's
        leaves = tree_flatten((args, kwargs))[0]
        if any(isinstance(leaf, torch.Tensor) and torch._is_zerotensor(leaf) for leaf in leaves):
            return func(*args, **kwargs)  # has no memory; kernels leave it to native
        others = detached_copy((args, kwargs))
        _C.set_answering(False)
        expected = func(*others[0], **others[1])
        rebuilt = detached_copy((args, kwargs)) if func._schema.is_mutable else (args, kwargs)
        _C.set_answering(True)
        actual = func(*args, **kwargs)
        _C.set_answering(False)
        try:
            self._compare(func, rebuilt, expected, actual)
        finally:
            _C.set_answering(True)
        return actual

    def _compare(self, func: Any, arguments: Any, expected: Any, actual: Any) -> None:
        natives, mine = _with_values(expected), _with_values(actual)
        if len(natives) != len(mine):
            raise Disagreement("metadata", f"{func}: {len(mine)} outputs, native {len(natives)}")
        if all(same_bits(a, b) for a, b in zip(natives, mine, strict=True)):
            return
        if func._schema.is_mutable:
            raise Disagreement("written", f"{func} writes other bits than native")
        self.judged += 1
        how = judge(func, arguments[0], arguments[1], natives, mine)
        if how:
            self.how[how] = self.how.get(how, 0) + 1


def _with_values(answer: Any) -> list[torch.Tensor]:
    """Its tensors; autograd works out some sizes on such as hold nothing."""
    return [t for t in tree_flatten(answer)[0] if isinstance(t, torch.Tensor) and not t.is_meta]


_verdicts: dict[str, tuple[str, str]] = {}


def _verdict(digest: str) -> tuple[str, str]:
    """(kind, numerics class) of a key's entry in the store.

    Without an entry a kernel for many shapes has answered; those are never called bitwise.
    """
    if digest not in _verdicts:
        manifest = session.store.find(digest)
        if manifest is None:
            return "kernel", "accurate"
        _verdicts[digest] = (manifest["kind"], manifest["facts"].get("numerics", ""))
    return _verdicts[digest]


def _description(func: Any, args: Any, kwargs: Any) -> tuple[dict[str, Any], str, str]:
    """(what the hook knows of the call, its kernel's numerics class, its key's verdict).

    ({}, "", "") for an operator that makes other hooked ones below.
    """
    _C.forget_recorded_calls()
    _C.set_recording(True)
    _C.set_answering(True)
    try:
        func(*args, **kwargs)
    finally:
        _C.set_answering(False)
        _C.set_recording(False)
    rows = [json.loads(text) for text, _ in _C.recorded_calls()]
    _C.forget_recorded_calls()
    if not rows:
        raise Disagreement("values", f"{func} differs, and nothing of it was hooked")
    if len(rows) > 1:
        return {}, "", ""
    (row,) = rows
    kind, numerics = _verdict(row["digest"])
    return row, numerics, kind


def _leaves(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """What stands in the tensor positions, in the schema's order."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for leaf in value if isinstance(value, (list, tuple)) else [value]:
            kind = str(argument.type)
            if isinstance(leaf, torch.Tensor) or ("Tensor" in kind and leaf is not None):
                yield leaf


def judge(func: Any, args: Any, kwargs: Any, natives: Sequence[Any], mine: Sequence[Any]) -> str:
    """What it took to tell that the answers are equal: "", or one of the two that are told apart.

    Raises Disagreement.
    """
    row, numerics, decision = _description(func, args, kwargs)
    if not row:
        _judge_composed(func, args, kwargs, natives, mine)
        return ""
    if decision != "kernel":
        raise Disagreement("values", f"{func} differs, and its key's verdict is {decision}")
    if numerics == "bitwise":
        raise Disagreement("bitwise", f"{func}: {_first_differences(natives, mine)}; {_short(row)}")
    call = Call(row)
    sample = Sample(list(_leaves(func, args, kwargs)), [])
    for value in sample.values:
        sample.bases.append(flat_of(value.detach()) if isinstance(value, torch.Tensor) else None)
    fewer = any(native.numel() < spec.numel for native in natives for spec in call.tensors)
    adds_up = accumulates(call) or fewer
    tolerance = tolerance_of(call, natives, adds_up)
    native = Native("program", 0, sample, list(natives), None)
    try:
        compare_values(call, native, natives, mine, tolerance)
    except ProofFailed as failed:
        if "ulp" not in str(failed):
            raise Disagreement("values", f"{func}: {failed}; {_short(row)}") from failed
        first = str(failed)
    else:
        return ""
    if adds_up:
        with contextlib.suppress(ProofFailed):
            moving = replace(tolerance, composed=True)
            compare_values(call, native, natives, mine, moving)
            return "ill-conditioned"
    _try_further(func, call, sample, tolerance, first, row)
    return "further samples"


_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(_WIDER.get(leaf.dtype, leaf.dtype))
    return _WIDER.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _judge_composed(
    func: Any, args: Any, kwargs: Any, natives: Sequence[Any], mine: Sequence[Any]
) -> None:
    """An operator of several that are hooked: each is within its class, and errors add up.

    They count in units of no less than what the result moves by when every operand moves by its
    last place, as those of functions do (Tolerance.composed).
    """
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _WIDER or leaf.is_complex():
            return _wide(leaf)
        signs = torch.randint(0, 2, leaf.size(), generator=generator) * 2 - 1
        return _wide(leaf) * (1 + signs * torch.finfo(leaf.dtype).eps)

    wide_args, wide_kwargs = tree_map(_wide, (args, kwargs))
    references = [t for t in tree_flatten(func(*wide_args, **wide_kwargs))[0] if t is not None]
    moved_args, moved_kwargs = tree_map(moved, (args, kwargs))
    near = [t for t in tree_flatten(func(*moved_args, **moved_kwargs))[0] if t is not None]
    sizes = [t.numel() for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    tolerance = Tolerance(max(1.0, math.log2(max(*sizes, 2))), reduces=True, composed=True)
    for index, (native, other) in enumerate(zip(natives, mine, strict=True)):
        if same_bits(native, other):
            continue
        if native.dtype not in _WIDER:
            raise Disagreement("values", f"{func}: output {index} ({native.dtype}) differs")
        change = torch.nan_to_num((near[index] - references[index]).abs(), 0, 0, 0)
        least = change.square().mean().sqrt() / torch.finfo(native.dtype).eps
        magnitude = references[index].abs().clamp_min(float(least))
        try:
            compare_with_reference(
                native, other, references[index], tolerance, f"output {index}", magnitude
            )
        except ProofFailed as failed:
            raise Disagreement("values", f"{func}: {failed}") from failed


class _Unbounded(Tolerance):
    """Measures errors and refuses none."""

    def bound(self, native_error: float, dtype: torch.dtype) -> float:
        """No bound."""
        return float("inf")


def _try_further(
    func: Any, call: Call, sample: Sample, tolerance: Tolerance, first: str, row: Any
) -> None:
    """Compares the largest errors over arguments near the ones that were past the rule."""
    generator = torch.Generator().manual_seed(0)
    worst = native_worst = 0.0
    loose = _Unbounded(ulps=tolerance.ulps, reduces=tolerance.reduces)
    for turn in range(ROUNDS):
        near = sample.clone() if turn == 0 else _moved(sample, generator)
        expected = call.invoke(near.values)
        _C.set_answering(True)
        try:
            actual = call.invoke(near.values)
        finally:
            _C.set_answering(False)
        native = Native("near", turn, near, expected, None)
        try:
            mine, natives = compare_values(call, native, expected, actual, loose)
        except ProofFailed as failed:
            raise Disagreement("values", f"{func}: {failed}; {_short(row)}") from failed
        worst, native_worst = max(worst, mine), max(native_worst, natives)
    dtype = next((spec.dtype for spec in call.tensors), torch.float32)
    if worst > tolerance.bound(native_worst, dtype):
        raise Disagreement(
            "values",
            f"{func}: {first}; near it {worst:.3g} ulp, native {native_worst:.3g}; {_short(row)}",
        )


def _moved(sample: Sample, generator: torch.Generator) -> Sample:
    near = sample.clone()
    for value, base in zip(near.values, near.bases, strict=True):
        if base is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        steps = torch.randint(-8, 9, base.size(), generator=generator)
        base.copy_(base.to(torch.float64) * (1 + steps * torch.finfo(base.dtype).eps))
    return near


def first_difference(native: torch.Tensor, mine: torch.Tensor) -> str:
    """How many elements differ, and the first of them."""
    same = (native == mine) | (native != native) & (mine != mine)
    if native.is_floating_point():
        same &= (torch.signbit(native) == torch.signbit(mine)) | (native != native)
    differs = ~same
    if not bool(differs.any()):
        return "no element differs"
    return (
        f"{int(differs.sum())} of {native.numel()} elements differ, the first is "
        f"{mine[differs][0].item()!r}, native {native[differs][0].item()!r}"
    )


def _first_differences(natives: Sequence[Any], mine: Sequence[Any]) -> str:
    return "; ".join(
        f"output {index}: {first_difference(a, b)}"
        for index, (a, b) in enumerate(zip(natives, mine, strict=True))
        if not same_bits(a, b)
    )


def _short(row: dict[str, Any]) -> str:
    """The call's key for people."""
    texts = []
    for argument in row["args"]:
        if argument["kind"] == "tensor":
            texts.append(f"{argument['dtype']}{argument['sizes']}/{argument['strides']}")
        elif "value" in argument:
            texts.append(str(argument["value"]))
    return ", ".join(texts)
