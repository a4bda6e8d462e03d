"""Readers of the facts that a manifest carries: text, by name, written by the compile worker."""

from __future__ import annotations

from collections.abc import Mapping

# Whether faster forms of a CUDA kernel were looked for: dispatcher/runtime/runtime_again.cc, too.
SEARCH = "search"
DUE = "due"
DONE = "done"


def number(known: Mapping[str, str], name: str) -> float | None:
    """None when the fact is missing or no number."""
    try:
        return float(known[name])
    except (KeyError, ValueError):
        return None


def compile_seconds(known: Mapping[str, str]) -> float | None:
    """CPU seconds that the entry cost, all steps together; None when they are not known."""
    # A name with a point is a part of the step before the point.
    names = [name for name in known if name.startswith("seconds_") and "." not in name]
    return sum(number(known, name) or 0.0 for name in names) if names else None


def gain(known: Mapping[str, str]) -> float | None:
    """Native's time over the kernel's, as the worker measured them; None when it did not."""
    native, kernel = number(known, "native_ns"), number(known, "kernel_ns")
    return native / kernel if native and kernel else None


def search_is_due(known: Mapping[str, str]) -> bool:
    """Whether forms of this entry's kernel may be faster, and none were looked for."""
    return known.get(SEARCH) == DUE


def gigabytes_per_second(known: Mapping[str, str]) -> float | None:
    """What the kernel moves in a second; None of a small call, or where it is not known.

    Bytes of inputs and outputs, each once, whatever the kernel reads twice.
    """
    moved = number(known, "bytes")
    took = number(known, "kernel_device_ns") or number(known, "kernel_ns")
    return moved / took if moved and took else None


def share_of_copy(known: Mapping[str, str]) -> float | None:
    """`gigabytes_per_second` of those of a copy on the machine that measured; None likewise."""
    mine, copy = gigabytes_per_second(known), number(known, "copy_gbps")
    return mine / copy if mine and copy else None
