"""What a composite operator is made of: found by running it on small tensors made from its schema.

Used for error messages only, off every hot path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagercache.base.load import core

# Sizes that all tensor arguments of one trial get. Square, so that products, norms over the last
# dimension and convolutions all accept some of them.
_TRIAL_SIZES = ((4, 4), (4,), (4, 4, 4), (4, 4, 4, 4), (4, 4, 4, 4, 4))
_TRIAL_DTYPES = (torch.float32, torch.int64)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        self.seen[f"{schema.name}{overload}"] = None
        return func(*args, **(kwargs or {}))


def _trial_value(type_text: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A value for a required argument of that schema type; raises KeyError for other types."""
    if type_text == "Tensor":
        return torch.ones(sizes, dtype=dtype)
    if type_text in ("Tensor[]", "List[Tensor]"):
        return [torch.ones(sizes, dtype=dtype), torch.ones(sizes, dtype=dtype)]
    simple: dict[str, Any] = {
        "int": 1,
        "SymInt": 1,
        "float": 0.5,
        "number": 1,
        "Scalar": 1,
        "bool": False,
        "str": "mean",
        "List[int]": [4],
        "List[SymInt]": [4],
        "int[]": [4],
        "SymInt[]": [4],
    }
    return simple[type_text]


def _trials(op: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    for dtype in _TRIAL_DTYPES:
        for sizes in _TRIAL_SIZES:
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            try:
                for argument in op._schema.arguments:
                    if argument.has_default_value():
                        continue
                    optional = str(argument.type).startswith("Optional")
                    value = None if optional else _trial_value(str(argument.type), sizes, dtype)
                    if argument.is_out and isinstance(value, torch.Tensor):
                        value = value.new_empty(0)  # PyTorch warns where it resizes another one
                    if argument.kwarg_only:
                        kwargs[argument.name] = value
                    else:
                        args.append(value)
            except KeyError:
                return
            yield args, kwargs


def parts_of(op: Any) -> list[str]:
    """Operators that the overload `op` dispatches to on the trials it accepts.

    In order of first appearance; empty when it accepts none.
    """
    recorder = _Recorder()
    for args, kwargs in _trials(op):
        try:
            with recorder, torch.no_grad():
                op(*args, **kwargs)
        except Exception:  # a trial that the operator refuses tells nothing
            continue
    own = op._schema.name
    return [name for name in recorder.seen if name != own and not name.startswith(f"{own}.")]


def parts_text(name: tuple[str, str], dispatch_key: str = "CPU") -> str:
    """A clause for an error message: the parts, and which of them can be named instead."""
    assert core is not None
    namespace, _, base = name[0].partition("::")
    overload = getattr(getattr(getattr(torch.ops, namespace), base), name[1] or "default")
    parts = parts_of(overload)
    if not parts:
        return ". Name the operators that it is made of instead"
    eligible = [p for p in parts if core.eligibility(*_split(p), dispatch_key)[0]]
    text = f". It is made of {', '.join(parts)}"
    if eligible:
        text += f"; of these {', '.join(eligible)} can be named"
    return text


def _split(full_name: str) -> tuple[str, str]:
    base, _, overload = full_name.partition(".")
    return base, overload
