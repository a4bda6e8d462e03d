"""What native calls really do, against dispatcher/operators/operator_effects.h.

Every sample of PyTorch's operator database is run natively, backward included; each call that
reaches a backend is made again on copies, and all memory that it could have touched is compared
before and after. An effect that the table does not know fails the test: the remedy is a row.

By default a sample of samples and dtypes (EFFECTS_SEED picks them); all of them with
EFFECTS_SAMPLES=all.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from conformance.database import BackendCall, Collected, Collector
from eagercache.base.load import core
from native_effects import (
    Observed,
    observe,
    run_sample,
    samples,
    tensors_in,
)

WHOLE = os.environ.get("EFFECTS_SAMPLES") == "all"
SEED = int(os.environ.get("EFFECTS_SEED", "20260817"))
SAMPLES = None if WHOLE else 5
CALLS = 200 if WHOLE else 5
OTHER_DTYPES = (
    torch.int64,
    torch.bool,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.uint8,
)
# Metadata operators: moving a tensor to other memory is what they are for.
RESHAPING = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_"}
# Marked as written and in place by name, but PyTorch leaves the counter alone.
SILENT = {"aten::resize_", "aten::resize_as_"}


def _extra_calls() -> Iterator[Callable[[], Any]]:
    """Operators that we hook by default and that the database's samples do not reach on CPU."""
    aten = torch.ops.aten
    x, w = torch.randn(4, 6, 5, 5), torch.rand(6) + 0.5
    yield lambda: aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)
    yield lambda: aten._native_batch_norm_legit_no_training(x, w, w, w, w, 0.1, 1e-5)
    yield lambda: aten.native_batch_norm(x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)
    yield lambda: aten.native_batch_norm(x, w, w, w.clone(), w.clone(), False, 0.1, 1e-5)
    yield lambda: aten.batch_norm_update_stats(x, w.clone(), w.clone(), 0.1)
    yield lambda: aten._batch_norm_with_update(x, w, w, w.clone(), w.clone(), 0.1, 1e-5)
    yield lambda: aten._unsafe_view(x, [24, 25])
    yield lambda: aten.unsafe_split_with_sizes(x, [1, 3])
    yield lambda: aten.lift(x)
    yield lambda: aten._reshape_copy(x, [24, 25])
    yield lambda: aten.clamp_max(x, 0.5)
    yield lambda: aten.clamp_min(x, 0.5)
    yield lambda: aten.reflection_pad2d(x, [1, 1, 2, 2])
    yield lambda: aten.reflection_pad3d(x, [1, 1, 2, 2, 1, 1])
    yield lambda: aten.native_channel_shuffle(x, 2)
    yield lambda: aten.channel_shuffle(x, 3)
    yield lambda: aten.lerp.Tensor(x, x, x)
    yield lambda: aten.clamp.default(x, -0.5, 0.5)
    yield lambda: aten.count_nonzero.dim_IntList(x, [1])
    yield lambda: aten.relu_(x.clone())
    yield lambda: aten.hardtanh_(x.clone(), -0.5, 0.5)
    yield lambda: aten.hardswish_(x.clone())
    yield lambda: aten.upsample_nearest2d(x, [10, 10])
    yield lambda: aten.upsample_nearest2d_backward(x, [5, 5], [4, 6, 3, 3])


@dataclass
class Survey:
    """What was run: native's effects call by call."""

    calls: list[tuple[BackendCall, Observed]]
    refused: Counter[str]  # by database operator or replayed call
    operators: set[str]  # that were observed at least once, as "aten::var.correction"


def _dtypes(op: Any, rng: random.Random) -> Sequence[torch.dtype]:
    supported = op.supported_dtypes("cpu")
    if WHOLE:
        return sorted(supported, key=str)
    first = [torch.float32] if torch.float32 in supported else []
    others = [dtype for dtype in OTHER_DTYPES if dtype in supported]
    return first + (rng.sample(others, 1) if others else [])


def _variants(op: Any) -> Iterator[Callable[[], Any]]:
    """The in-place and out= forms of one float32 sample."""
    inplace = op.get_inplace()
    for sample in samples(op, torch.float32, 1):
        first, args, kwargs = sample.input, sample.args, sample.kwargs
        with torch.no_grad():
            if inplace is not None and isinstance(first, torch.Tensor):
                yield partial(inplace, first.clone(), *args, **kwargs)
            if op.supports_out:
                out = op(first, *args, **kwargs)
                # What returns its argument unchanged would write its own input.
                if not {id(t) for t in tensors_in(out)} & {id(t) for t in tensors_in(first)}:
                    yield partial(op, first, *args, **{**kwargs, "out": out})


def _record(recorder: Collector, refused: Counter[str]) -> None:
    from torch.testing._internal import common_methods_invocations as database

    rng = random.Random(SEED)

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            with recorder:
                call()
        except Exception as error:  # what a dtype or build does not support
            refused[f"{name}: {type(error).__name__}"] += 1

    for op in database.op_db:
        for dtype in _dtypes(op, rng):
            try:
                made = list(samples(op, dtype, SAMPLES))
            except Exception as error:
                refused[f"{op.name}: {type(error).__name__}"] += 1
                continue
            for sample in made:
                attempt(op.name, partial(run_sample, op, sample))
        if torch.float32 in op.supported_dtypes("cpu"):
            try:
                for call in _variants(op):
                    attempt(op.name, call)
            except Exception as error:
                refused[f"{op.name}: {type(error).__name__}"] += 1
    for name in ("unary", "binary", "pointwise", "other", "reduce"):
        for op in getattr(database, f"foreach_{name}_op_db"):
            for sample in list(op.sample_inputs("cpu", torch.float32))[:1]:
                for form in filter(None, (op, op.get_inplace())):
                    attempt(op.name, partial(form, sample.input, *sample.args, **sample.kwargs))
    for call in _extra_calls():
        with recorder:
            call()


def _survey() -> Survey:
    collected = Collected()
    refused: Counter[str] = Counter()
    torch.manual_seed(SEED)
    _record(Collector(None, CALLS, collected), refused)
    calls = []
    for call in collected.calls:
        try:
            calls.append((call, observe(call)))
        except Exception as error:
            refused[f"{call.func}: {type(error).__name__}"] += 1
    return Survey(calls, refused, {call.name for call, _ in calls})


@pytest.fixture(scope="module")
def survey() -> Survey:
    """All recorded calls, made again and observed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
            warnings.simplefilter("ignore")
            # On a thread of its own, where the stack is short: the database formats all of it for
            # every sample.
            result = pool.submit(_survey).result()
    finally:
        torch.set_num_threads(threads)
    print(
        f"seed {SEED}: {len(result.calls)} calls of {len(result.operators)} operators, "
        f"refused {dict(result.refused)}"
    )
    return result


_EFFECTS: dict[str, dict[str, Any]] = {}


def _effects(call: BackendCall) -> dict[str, Any]:
    assert core is not None
    name = call.name
    if name not in _EFFECTS:
        schema = call.func._schema
        _EFFECTS[name] = core.operator_effects(schema.name, schema.overload_name)
    return _EFFECTS[name]


def _written(call: BackendCall) -> set[str]:
    """The arguments that the table says this very call may write."""
    named = call.named_arguments()
    defaults = {a.name: a.default_value for a in call.func._schema.arguments}
    return {
        row["argument"]
        for row in _effects(call)["writes"]
        if not row["when"] or named.get(row["when"], defaults.get(row["when"]))
    }


def _shares_memory_with(call: BackendCall, name: str, others: set[str]) -> bool:
    named = call.named_arguments()
    mine = {t.untyped_storage()._cdata for t in tensors_in(named[name])}
    return any(
        t.untyped_storage()._cdata in mine for other in others for t in tensors_in(named.get(other))
    )


def _said(call: BackendCall, observed: Observed) -> str:
    shapes = [list(t.size()) for t in tensors_in((call.args, call.kwargs))]
    return f"{call.name} on {shapes}: {observed}; the table says {_effects(call)}"


def test_the_survey_saw_the_database(survey: Survey) -> None:
    assert len(survey.calls) > 2500
    assert len(survey.operators) > 900


def test_no_call_writes_what_the_table_does_not_know(survey: Survey) -> None:
    for call, observed in survey.calls:
        written = _written(call)
        for name in (observed.written | observed.reshaped) - written:
            assert _shares_memory_with(call, name, written), _said(call, observed)
        if observed.reshaped:
            outputs = {
                a.name
                for a in call.func._schema.arguments
                if a.is_out or call.func._schema.name.rpartition("::")[2].endswith("_")
            }
            assert observed.reshaped <= outputs, _said(call, observed)


def test_version_counters_move_where_the_table_says_and_nowhere_else(survey: Survey) -> None:
    for call, observed in survey.calls:
        if call.func._schema.name in SILENT:
            continue
        passed = call.named_arguments()
        moves = {
            row["argument"]
            for row in _effects(call)["writes"]
            if row["moves_version"] and tensors_in(passed.get(row["argument"]))
        }
        assert moves <= observed.bumped, _said(call, observed)
        for name in observed.bumped - moves:
            assert _shares_memory_with(call, name, moves), _said(call, observed)


def test_no_output_shares_memory_that_the_table_does_not_know_of(survey: Survey) -> None:
    for call, observed in survey.calls:
        outputs = _effects(call)["outputs"]
        for declared, aliases in zip(outputs, observed.aliases, strict=True):
            known = set(declared["arguments"])
            for name in aliases - known:
                assert _shares_memory_with(call, name, known), _said(call, observed)


def test_in_place_and_out_operators_return_the_very_argument(survey: Survey) -> None:
    met = 0
    for call, observed in survey.calls:
        for declared, same in zip(_effects(call)["outputs"], observed.same_object, strict=True):
            if declared["kind"] == "argument":
                met += 1
                assert set(declared["arguments"]) & same, _said(call, observed)
    assert met > 200


def test_every_eligible_operator_does_no_more_than_kernels_can(survey: Survey) -> None:
    assert core is not None
    eligible = {
        f"{name}.{overload}".removesuffix(".") for name, overload in core.eligible_operators("CPU")
    }
    for call, observed in survey.calls:
        if call.name not in eligible:
            continue
        written = _written(call)
        out = {a.name for a in call.func._schema.arguments if a.is_out}
        # Calls that give out= another size are found when native answers them for the proof.
        assert observed.reshaped <= out, _said(call, observed)
        assert written or not (observed.written or observed.bumped), _said(call, observed)
        passed = set(call.named_arguments())
        if any(_shares_memory_with(call, name, passed - {name}) for name in written & passed):
            continue  # what is written is another argument too: such a call steps aside
        for declared, aliases in zip(_effects(call)["outputs"], observed.aliases, strict=True):
            assert aliases <= set(declared["arguments"]) & written, _said(call, observed)
    print(f"{len(eligible & survey.operators)} of {len(eligible)} eligible operators observed")
    assert len(eligible & survey.operators) > 380


def test_every_default_operator_was_observed(survey: Survey) -> None:
    assert core is not None
    defaults = {f"{n}.{o}".removesuffix(".") for n, o in core.default_operators("CPU")}
    assert not defaults - survey.operators


@pytest.mark.parametrize(
    ("operator", "argument"),
    [
        ("native_batch_norm", "running_mean"),
        ("native_batch_norm", "running_var"),
        ("batch_norm_update_stats", "running_mean"),
    ],
)
def test_the_survey_would_see_a_write_that_no_schema_marks(
    survey: Survey, operator: str, argument: str
) -> None:
    assert any(
        argument in observed.written and argument not in observed.bumped
        for call, observed in survey.calls
        if call.func._schema.name == f"aten::{operator}"
    )


@pytest.mark.parametrize("operator", ["_unsafe_view", "unsafe_split", "lift"])
def test_the_survey_would_see_a_view_that_no_schema_marks(survey: Survey, operator: str) -> None:
    assert any(
        "self" in observed.aliases[0]
        for call, observed in survey.calls
        if call.func._schema.name == f"aten::{operator}"
    )
