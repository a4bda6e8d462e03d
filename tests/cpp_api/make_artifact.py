"""Makes what deployed_module_test.cc opens, `module` and its keys: make_artifact.py FOLDER."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from eagercache import export_module
from eagercache.ahead import bundle


class Steps(torch.nn.Module):
    """Answers with one number that says of which version its weights are; see the test."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A folded constant is in it: shift + scale."""
        return (self.first(x) + (self.shift + self.scale)) * self.scale


def main() -> int:
    """One artifact; all weights are 1."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    bundle.keygen(folder / "own")
    bundle.keygen(folder / "other")
    torch.set_num_threads(1)
    model = Steps().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    made = export_module(
        model,
        (torch.randn(2, 8),),
        path=folder / "module",
        key=folder / "own.pem",
        open_sizes={"x": [0]},
    )
    return 0 if made.folded == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
