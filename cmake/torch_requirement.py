"""What a built wheel requires, for scikit-build-core: the torch that it was built against.

A source distribution takes every torch from 2.11 on, and so does metadata where no torch is found.
"""

from __future__ import annotations

import importlib.metadata
import re

OTHERS = ("click", "cloudpickle", "rich")
OLDEST = "torch>=2.11"


_building: list[str] = []


def build_state(state: str) -> None:
    """Called first, with what is being built: "sdist", "wheel" and the like."""
    _building[:] = [state]


def dynamic_metadata(_settings: object, _project: object) -> dict[str, list[str]]:
    """The dependencies."""
    torch = OLDEST if _building == ["sdist"] else torch_requirement()
    return {"dependencies": [torch, *OTHERS]}


def torch_requirement() -> str:
    """As "torch>=2.11,<2.12", of the torch that is installed where this runs."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return OLDEST
    if found is None:
        return OLDEST
    major, minor = int(found[1]), int(found[2])
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def dynamic_wheel(_settings: object) -> dict[str, bool]:
    """That a wheel's dependencies may differ from those of the sources that it is built from."""
    return {"dependencies": True}
