"""What a compiled object says it was made for, so that no other launch data is used with it.

A manifest says how an object's functions are called: with which outputs, scratch, inputs and
strides. Code that is called otherwise writes where it should not. So each object has a text,
`SYMBOL`, with one line for each entry that it is of: a digest of the entry's key and of all that is
said about calling it. Whoever loads the object compares (dispatcher/plans/contract.h). A cubin has
its line at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SYMBOL = "eagercache_made_for"


def contract_of(key: str, form: str, plan: str, strides: str, features: Iterable[str]) -> str:
    """The digest of one entry, in hexadecimal digits.

    Args:
        key: of the entry.
        form: as the entry's fact of that name.
        plan: the launch plan; that of a kernel with symbolic sizes without its choice.
        strides: of the outputs, as the entry has them; "" where the plan has them.
        features: what the code needs of the processor, in the entry's order.
    """
    rows = ("key", key), ("form", form), ("plan", plan), ("strides", strides)
    text = "".join(f"{name} {value}\n" for name, value in (*rows, ("cpu", " ".join(features))))
    return hashlib.sha256(text.encode()).hexdigest()


def definition(contracts: Iterable[str]) -> str:
    """The C++ text that puts them into an object."""
    lines = "".join(f'    "{contract}\\n"\n' for contract in sorted(set(contracts)))
    attributes = '__attribute__((visibility("default"), used))'
    return f'\nextern "C" {{\n{attributes} char {SYMBOL}[] =\n{lines}    "";\n}}\n'


def are_of(contracts: Sequence[str], objects: Sequence[Path]) -> bool:
    """Whether the files ``objects`` are those of ``contracts``, one for each."""
    return len(contracts) == len(objects) and all(
        contract.encode() in path.read_bytes()
        for contract, path in zip(contracts, objects, strict=True)
    )


def cubin_with(cubin: bytes, contract: str) -> bytes:
    """A cubin with its line behind the ELF file, where the driver does not read."""
    return cubin + f"\n{SYMBOL}\n{contract}\n".encode()


def module_contracts(
    key: str, facts: Mapping[str, str], features: Sequence[str], training: Mapping[str, Any] | None
) -> list[str]:
    """Those of a module's containers: the forward's, and the backward's of a plan for ``training``.

    Of the facts these count: what they are only called for when the objects are there does not.
    """
    known = ("inputs", "ranges", "outputs", "writes", "checks", "sizes")
    rows: dict[str, Any] = {name: facts.get(name, "") for name in known}
    if "noise" in facts:
        rows["noise"] = facts["noise"]
    parts = ["forward"]
    if training is not None:
        rows["training"] = _training_rows(training)
        parts.append("backward")
    plan = json.dumps(rows, sort_keys=True, separators=(",", ":"))
    # Of a call that needs gradients they are native's where they say nothing.
    strides = "" if training is not None else facts["output_strides"]
    return [contract_of(key, f"{facts['form']} {part}", plan, strides, features) for part in parts]


def _training_rows(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan (worker/modules/training.py) says of tensors that the containers exchange."""
    rows = {name: plan[name] for name in ("saved", "tangents", "rebuilt", "noise", "draws")}
    rows["buffers"] = [row[0] for row in plan["buffers"]]
    rows["gradients"] = [row[:2] for row in plan["gradients"]]
    if "open" in plan:
        rows["open"] = plan["open"]
    return rows
