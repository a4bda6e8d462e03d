"""`eagercache explain` and `eagercache bench`: operators and stored kernels, looked at closely."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from eagercache.base import config, entry_facts
from eagercache.calls.texts import counted, first_line
from eagercache.cli.common import (
    Unusable,
    call_text,
    directory_option,
    entries_as_json,
    json_option,
    microseconds,
    open_store,
    print_json,
    require_core,
    store_path,
    table,
)

_PAIRS = 15
_SECONDS_PER_SIDE = 0.002
_WARM_CALLS = 3


@click.command("explain")
@directory_option
@json_option
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.argument("operator")
def explain_command(directory: Path | None, as_json: bool, device: str, operator: str) -> None:
    """Says whether OPERATOR can have kernels, and what the store decided for its calls.

    OPERATOR is a name ("aten::var.correction", "var"). Why one call of a running program is or is
    not answered by a kernel is eagercache.explain().
    """
    from eagercache.base import operators
    from eagercache.runtime import choices

    require_core()
    try:
        names = operators.resolve(operator)
    except ValueError as error:
        raise Unusable(str(error)) from error
    key = choices.DISPATCH_KEYS[device]
    overloads = [_overload(name, key) for name in sorted(names, key=lambda one: len(one[1]))]
    entries = []
    if store_path(directory).is_dir():
        wanted = {row["op"] for row in overloads}
        for entry in open_store(directory, read_only=True).entries():
            known = entry["facts"]
            if known.get("op") in wanted and known.get("dispatch_key") == key:
                entries.append(_entry_row(entry))
    if as_json:
        print_json({"overloads": overloads, "entries": entries_as_json(entries)})
        return
    for row in sorted(overloads, key=lambda one: not one["eligible"]):
        click.echo(f"{row['op']} at {key}: {_sentence(row)}")
    if not entries:
        click.echo("The store has no verdict on any of its calls in this environment.")
        return
    table(
        counted(len(entries), "verdict"),
        [
            ("call", ""),
            ("decision", ""),
            ("why", ""),
            ("native us", "right"),
            ("kernel us", "right"),
            ("speed-up", "right"),
        ],
        [
            (
                row["call"],
                row["decision"],
                row["reason"],
                microseconds(row["facts"], "native_ns"),
                microseconds(row["facts"], "kernel_ns"),
                _times(entry_facts.gain(row["facts"])),
            )
            for row in entries
        ],
    )


def _overload(name: tuple[str, str], key: str) -> dict[str, Any]:
    from eagercache.base import decomposition, operators

    core = require_core()
    eligible, composite, reason = core.eligibility(name[0], name[1], key)
    parts = decomposition.parts_text(name, key).removeprefix(". ") if composite else ""
    return {
        "op": operators.full_name(name),
        "eligible": bool(eligible),
        "default": tuple(name) in {tuple(one) for one in core.default_operators(key)},
        "reason": "" if eligible else str(reason),
        "parts": parts,
    }


def _sentence(row: Mapping[str, Any]) -> str:
    if not row["eligible"]:
        text = f"no kernels: {row['reason'].removeprefix(row['op'] + ': ')}"
        return f"{text}. {row['parts']}" if row["parts"] else text
    if row["default"]:
        return "can have kernels; enable() hooks it"
    return "can have kernels; hooked when it is named, or with ops='all'"


def _entry_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    known = entry["facts"]
    return {
        "key": entry["key"],
        "call": call_text(known),
        "decision": entry["kind"],
        "reason": known.get("reason", ""),
        "facts": dict(known),
    }


def _times(gain: float | None) -> str:
    return f"x{gain:.2f}" if gain is not None else ""


@click.command("bench")
@directory_option
@json_option
@click.option("--op", default="", help="Only operators whose name contains this.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Kernels.")
def bench_command(directory: Path | None, as_json: bool, op: str, limit: int) -> None:
    """Measures stored CPU kernels here and now: calls from Python, with the kernel and without.

    Each is called with made-up data, in alternation with native; times include what Python and the
    dispatcher take. The last column is what the worker measured, from C++, before it decided.
    """
    store = open_store(directory, read_only=True)
    rows = [
        row
        for row in store.entries()
        if row["kind"] == "kernel"
        and row["facts"].get("dispatch_key") == "CPU"
        and row["facts"].get("op", "").startswith("aten::")
        and op in row["facts"]["op"]
    ]
    if not rows:
        of_op = f" of an operator whose name contains {op!r}" if op else ""
        raise Unusable(f"{store.root} has no CPU kernel{of_op} for this environment; see `stats`")
    rows.sort(key=lambda row: (row["facts"]["op"], row["key"]))
    results = list(_measure(store.root, rows[:limit]))
    if as_json:
        print_json({"store": store.root, "left_out": len(rows) - len(results), "kernels": results})
        return
    title = f"{len(results)} of {counted(len(rows), 'kernel')} in {store.root}"
    columns = [("operator", ""), ("call", "")]
    columns += [(name, "right") for name in ("native us", "kernel us", "speed-up", "when stored")]
    table(title, columns, [_bench_cells(row) for row in results])


def _bench_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["problem"]:
        return (row["op"], row["call"], "", "", row["problem"], _times(row["stored"]))
    return (
        row["op"],
        row["call"],
        f"{row['native_us']:.2f}",
        f"{row['kernel_us']:.2f}",
        _times(row["speed_up"]),
        _times(row["stored"]),
    )


def _measure(root: str, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One result for each entry. Whatever else was enabled in this process is not any more."""
    from eagercache.frontend import api

    def choose(entry: Mapping[str, Any]) -> config.Choose:
        return "always" if entry["facts"].get("choose") == "always" else "faster"

    for policy, group in itertools.groupby(sorted(rows, key=choose), choose):
        entries = list(group)
        names = sorted({entry["facts"]["op"] for entry in entries})
        with api.enable(names, on_miss="native", choose=policy, cache_dir=root):
            for entry in entries:
                known = entry["facts"]
                result = {"op": known["op"], "call": call_text(known), "key": entry["key"],
                          "stored": entry_facts.gain(known), "problem": ""}  # fmt: skip
                try:
                    result.update(_measure_one(known))
                except (ValueError, RuntimeError) as error:
                    result["problem"] = first_line(error, 1000)
                yield result


def _measure_one(known: Mapping[str, str]) -> dict[str, float]:
    """Medians in microseconds. Raises ValueError or RuntimeError, saying what is in the way."""
    from eagercache.calls.call import Call
    from eagercache.worker.validation.native import native_answers

    core = require_core()
    op, _, overload = known["op"].partition(".")
    if "call" not in known:
        raise ValueError("its entry has no room for the call")
    described = json.loads(known["call"])
    call = Call({"op": op, "overload": overload, "dispatch_key": "CPU", **described})
    with call.state.applied():
        core.set_answering(False)
        args, kwargs = call.bind(native_answers(call)[0].sample.clone().values)
        core.set_answering(True)

        def once() -> None:
            call.op(*args, **kwargs)

        hits = _hits()
        for _ in range(_WARM_CALLS):
            once()
        if _hits() == hits:
            raise RuntimeError("its kernel does not answer here")
        begin = time.perf_counter()
        once()
        calls = max(1, int(_SECONDS_PER_SIDE / max(time.perf_counter() - begin, 1e-7)))
        native, kernel = [], []
        for _ in range(_PAIRS):
            core.set_answering(False)
            native.append(_seconds(once, calls))
            core.set_answering(True)
            kernel.append(_seconds(once, calls))
    ratio = statistics.median(n / k for n, k in zip(native, kernel, strict=True))
    return {
        "native_us": statistics.median(native) * 1e6,
        "kernel_us": statistics.median(kernel) * 1e6,
        "speed_up": ratio,
    }


def _hits() -> int:
    return sum(row["hits"] for row in require_core().operator_stats())


def _seconds(function: Callable[[], None], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls
