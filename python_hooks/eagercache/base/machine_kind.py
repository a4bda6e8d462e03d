"""Which kind of machine this is: what an entry was proved and timed on, beside the environment key.

Machines of one environment share kernels, and may still have different processors: libraries choose
their code by the maker, approximate instructions differ in last bits, and what is faster on one may
be slower on another. Nothing here asks a driver, or takes long.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

# An entry's facts: on which kind of machine it was proved; before that, where it comes from.
MACHINE = "machine"
MADE_ON = "made_on"
# What is to be tried of an entry of another kind (kernel_cache/store/withdrawal.h).
UNTRIED = "untried"
VALUES, VALUES_AND_TIMES = "values", "values times"

_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "model name")
_CPU_BYTES = 4096  # the first processor's part; the others are alike
_GPUS = Path("/proc/driver/nvidia/gpus")
_CPUINFO = Path("/proc/cpuinfo")


def kind_for(dispatch_key: str) -> str:
    """What answers calls of a dispatch key on this machine; "" where it cannot be told.

    The processor for CPU. For CUDA the GPUs' name, where all are of one.
    """
    return _gpu() if dispatch_key == "CUDA" else _cpu()


def is_of_this_kind(facts: Mapping[str, str]) -> bool:
    """Whether the entry with these facts was proved on a machine like this. False in doubt."""
    mine = kind_for(facts.get("dispatch_key", "CPU"))
    return bool(mine) and facts.get(MACHINE) == mine


@functools.cache
def _cpu() -> str:
    try:
        with _CPUINFO.open("rb") as file:
            text = file.read(_CPU_BYTES).decode(errors="replace")
    except OSError:
        return ""
    first = text.partition("\n\n")[0]
    rows = dict(line.partition(":")[::2] for line in first.splitlines())
    known = {name.strip(): " ".join(value.split()) for name, value in rows.items()}
    if not all(known.get(name) for name in _CPU_FIELDS):
        return ""
    return " ".join(known[name] for name in _CPU_FIELDS)


@functools.cache
def _gpu() -> str:
    names = set()
    try:
        for path in _GPUS.glob("*/information"):
            rows = path.read_text(errors="replace").splitlines()
            names.add(next(" ".join(row.split()[1:]) for row in rows if row.startswith("Model:")))
    except (OSError, StopIteration):
        return ""
    return names.pop() if len(names) == 1 else ""
