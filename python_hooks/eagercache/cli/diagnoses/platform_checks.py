"""What `eagercache doctor` says first: whether eagercache can work here at all.

Imports no torch, so that it can be said of one that cannot be imported.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

from eagercache.base import load
from eagercache.base.torch_versions import platform_problem
from eagercache.cli.diagnoses.check import Check


def platform_checks() -> Iterator[Check]:
    """The platform, and a torch that cannot be used."""
    problem = platform_problem(platform.system(), platform.machine())
    if problem is None:
        yield Check("platform", "ok", f"{platform.system()} {platform.machine()}")
    else:
        yield Check("platform", "problem", problem, "use Linux on x86-64")
    if problem is None and load.refusal:
        remedy = "install a torch that it was built against, or build it again against this one"
        yield Check("torch", "problem", load.refusal, remedy)
