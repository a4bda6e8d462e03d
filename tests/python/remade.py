"""Objects that say they were made for other entries than theirs, for tests that forge these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagercache.calls import contract


def contract_of(key: str, entry: Mapping[str, Any]) -> str:
    """What the object of an operator's entry with these facts says, were ``key`` its key."""
    facts = entry["facts"]
    return contract.contract_of(
        key,
        facts["form"],
        facts.get("launch_plan", ""),
        facts.get("output_strides", ""),
        entry["cpu_features"],
    )


def object_for(
    key: str, entry: Mapping[str, Any], store: Path, folder: Path
) -> list[tuple[str, str]]:
    """The objects of a bare or contained kernel, as sources of an entry of that key."""
    (known,) = entry["objects"]
    data = next(store.rglob(f"{known['digest']}.so")).read_bytes()
    old = contract_of(entry["key"], entry).encode()
    assert data.count(old) == 1
    made = folder / f"{key}.so"
    made.write_bytes(data.replace(old, contract_of(key, entry).encode()))
    return [("so", str(made))]
