"""What a request for a whole module does with another kind of machine's kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.jobs.module_job import ModuleJob
from eagercache.worker.jobs.untried import Untried

THEIRS, OURS = Path("theirs.so"), Path("ours.so")


class Judged(ModuleJob):
    """Its kernel of another machine ends with ``error``; what is compiled here proves."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        facts = {"op": "Linear", "machine": "another"}
        manifest = {"key": "00", "facts": facts}
        self._untried = Untried(manifest, (("so", str(THEIRS)),))

    def _compile(self, _: Any, made: Path | None = None) -> Any:
        if made is not None:
            raise self.error
        return SimpleNamespace(path=OURS)


@pytest.mark.parametrize(
    "error",
    [ProofFailed("off by 9 ulp"), RuntimeError("the container does not load: undefined symbol")],
)
def test_what_does_not_prove_or_load_is_compiled_here(error: Exception) -> None:
    tried, result = Judged(error)._try_or_make(SimpleNamespace())  # type: ignore[arg-type]
    assert not tried
    assert result.path == OURS


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: unspecified")],
)
def test_what_says_nothing_of_the_kernel_ends_the_request(error: Exception) -> None:
    with pytest.raises(type(error)):
        Judged(error)._try_or_make(SimpleNamespace())  # type: ignore[arg-type]
