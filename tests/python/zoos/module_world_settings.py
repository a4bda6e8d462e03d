"""What forwards of module_world.py ask of torch and of the process. Importable, as it is."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional

# What a program leaves in a module that is not its own.
torch.test_world_gains = [2.0]  # type: ignore[attr-defined]


def variable(name: str) -> str:
    """Asks for a variable whose name is no literal here."""
    return os.environ.get(name, "1.0")


class Settings:
    """Functions of `World`, each of which reads something that is set outside of the program."""

    dense: nn.Linear

    def function(self, y: torch.Tensor) -> torch.Tensor:
        """A function of torch that a program may patch."""
        return functional.gelu(y)

    def method(self, y: torch.Tensor) -> torch.Tensor:
        """A method of Tensor that a program may patch."""
        return y.exp().sum(-1)

    def operator(self, y: torch.Tensor) -> torch.Tensor:
        """The same, behind an operator."""
        return y @ y.t()

    def environment(self, y: torch.Tensor) -> torch.Tensor:
        """A variable that is not set."""
        return y * float(variable("TEST_" + "WORLD"))

    def folder(self, y: torch.Tensor) -> torch.Tensor:
        """What a worker has for itself."""
        return y * len(tempfile.gettempdir())

    def group(self, y: torch.Tensor) -> torch.Tensor:
        """Whether there is a process group; a worker has none."""
        return y * 3.0 if torch.distributed.is_initialized() else y

    def variable_of_bytes(self, y: torch.Tensor) -> torch.Tensor:
        """A variable of the environment in its other form."""
        return y * float(os.environb.get(b"TEST_WORLD_BYTES", b"1.0"))

    def autocast_dtype(self, y: torch.Tensor) -> torch.Tensor:
        """A setting that no key has."""
        return y * (2.0 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else 3.0)

    def list_of_torch(self, y: torch.Tensor) -> torch.Tensor:
        """A list that the program put into another package."""
        for gain in torch.test_world_gains:  # type: ignore[attr-defined]
            y = y * gain
        return y

    def asked_of_torch(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute that another package has not yet."""
        return y * getattr(functional, "test_world_asked", 2.0)

    def imported(self, y: torch.Tensor) -> torch.Tensor:
        """Whether somebody imported something."""
        return y * (3.0 if "test_world_imported" in sys.modules else 2.0)

    def tensor_cores(self, y: torch.Tensor) -> torch.Tensor:
        """A setting that no key has."""
        return y * (3.0 if torch.backends.cuda.matmul.allow_tf32 else 2.0)

    def sums(self, y: torch.Tensor) -> torch.Tensor:
        """A setting that Dynamo asks torch for where it has no rule."""
        setting = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        return y * (2.0 if setting else 3.0)

    def tracer(self, y: torch.Tensor) -> torch.Tensor:
        """Code that is another one for a compiler."""
        return y if torch.compiler.is_compiling() else y / y.norm()
