"""Readers of the facts that a manifest carries: text, by name, written by the compile worker."""

from __future__ import annotations

from collections.abc import Mapping


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
