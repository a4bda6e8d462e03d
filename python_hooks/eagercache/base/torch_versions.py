"""Where eagercache runs: the releases of torch that it is built and tested with, and the platform.

The scripts and the matrix read the rows, and so does the import, which tells another torch by them.
A new release is a row here and a file of its requirements (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Tried(NamedTuple):
    """One release."""

    torch: str
    # The oldest Python that this torch has a build for.
    python: str


# In ascending order, one line each: scripts/common.sh reads these lines without a Python.
TRIED = (
    Tried("2.11.0", "3.10"),
    Tried("2.12.1", "3.10"),
    Tried("2.13.0", "3.10"),
    Tried("2.14.1", "3.10"),
    Tried("2.15.0", "3.11"),
)


def platform_problem(system: str, machine: str) -> str | None:
    """Why this platform cannot run eagercache, or None. Linux on x86-64 is the only one."""
    if system == "Linux" and machine in ("x86_64", "AMD64"):
        return None
    missing = ""
    if system == "Linux" and machine in ("aarch64", "arm64"):
        missing = (
            " For this processor there are the store, the keys and the signatures; what is missing "
            "is the extension beside torch, and rules which instructions its kernels may use."
        )
    return (
        f"eagercache runs on Linux x86-64 only; this is {system} {machine}.{missing} "
        "Everything stays native, and eagercache's functions do nothing."
    )


def minor(version: str) -> str:
    """Of a version of torch, what its C++ interface holds within: "2.15" of "2.15.0+cu132"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def in_order(minors: Iterable[str]) -> list[str]:
    """Minor versions from the oldest to the newest; what is no version is left out."""
    known = (text for text in minors if all(part.isdigit() for part in text.split(".")))
    return sorted(known, key=lambda text: [int(part) for part in text.split(".")])


def is_tried(version: str) -> bool:
    """Whether a release of that minor version was tried; a pre-release of it was not."""
    known = {minor(row.torch) for row in TRIED}
    return minor(version) in known and not is_prerelease(version)


def is_prerelease(version: str) -> bool:
    """Whether it is a release candidate, a nightly or a build of somebody's own sources."""
    rest = version.split("+")[0].split(".")
    return not all(part.isdigit() for part in rest)
