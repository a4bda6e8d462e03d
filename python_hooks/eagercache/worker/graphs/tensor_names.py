"""Which names of tensors a module's code reads."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator

import torch

from eagercache.callables.guard_rows import GuardRow, Path, describe


def tensor_names(codes: Iterable[tuple[types.CodeType, str]]) -> list[GuardRow]:
    """What stands in `torch.Tensor` under the names that this code asks for: it may be patched."""
    named = {name for code, _ in codes for name in (*code.co_names, *_strings(code))}
    members = vars(torch.Tensor)
    special = {name for name in dir(torch._C.TensorBase) if name.startswith("__")}
    known = sorted(
        name
        for name in named | special
        if callable(members.get(name)) or callable(getattr(torch._C.TensorBase, name, None))
    )
    path: Path = (("import", "torch"), ("attr", "Tensor"))
    nobody = torch.nn.Module()
    return [GuardRow(path, "names", known, describe(torch.Tensor, "names", known, nobody))]


def _strings(code: types.CodeType) -> Iterator[str]:
    return (constant for constant in code.co_consts if isinstance(constant, str))
