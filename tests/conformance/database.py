"""Samples of PyTorch's operator database, and the backend calls that they make."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from eagercache.calls.numerics import REDUCTION, place_of_reduction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

LARGEST_CALL_BYTES = 1 << 22
SEED = 20_240_917


@functools.cache
def operators() -> dict[str, Any]:
    """The database by name; operators on tensor lists among them."""
    from torch.testing._internal import common_methods_invocations as database

    found = {op.full_name: op for op in database.op_db}
    for name in ("unary", "binary", "pointwise", "other", "reduce"):
        for op in getattr(database, f"foreach_{name}_op_db", ()):
            found[op.full_name] = op
    return found


def sample_counts(
    device: str, dtypes: Sequence[str], names: Iterable[str]
) -> dict[str, dict[str, int]]:
    """For each of these operators how many samples it has of those dtypes that it takes.

    They are made on the CPU.
    """
    return {name: _counts(device, dtypes, name) for name in names}


def _counts(device: str, dtypes: Sequence[str], name: str) -> dict[str, int]:
    op = operators()[name]
    taken = {str(dtype).removeprefix("torch.") for dtype in op.supported_dtypes(device)}
    return {dtype: _count(op, getattr(torch, dtype)) for dtype in dtypes if dtype in taken}


def _count(op: Any, dtype: torch.dtype) -> int:
    try:
        return len(samples(op, "cpu", dtype, 0, None))
    except Exception:  # whoever asks for them is told why
        return 0


def samples(op: Any, device: str, dtype: torch.dtype, first: int, last: int | None) -> list[Any]:
    """The database's samples from number ``first`` to before ``last``, the same in every run."""
    torch.manual_seed(SEED)
    grad = bool((dtype.is_floating_point or dtype.is_complex) and op.supports_autograd)
    made = op.sample_inputs(device, dtype, requires_grad=grad)
    return list(itertools.islice(made, first, last))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor whose memory says all about it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._is_zerotensor(tensor)
    )


def copy(value: Any) -> Any:
    """The same in memory of its own; what shared memory still does, and leaves are leaves."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}

    def copy_one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in made:
            return made[id(leaf)]
        if not is_plain(leaf):
            made[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return made[id(leaf)]
        storage = leaf.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copied = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
            storages[storage._cdata], leaf.storage_offset(), leaf.size(), leaf.stride()
        )
        made[id(leaf)] = copied.requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    with torch.no_grad():
        return tree_map(copy_one, value)


def detached_copy(value: Any) -> Any:
    """As `copy`, but nothing in it needs gradients."""
    return tree_map(_detached, copy(value))


@dataclass(frozen=True)
class BackendCall:
    """A call of one overload as a backend gets it.

    Attributes:
        form: how it came about: "sample", or one of `forms.py`.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    form: str = "sample"

    @property
    def name(self) -> str:
        """As in "aten::var.correction"."""
        return overload_name(self.func)

    def named_arguments(self) -> dict[str, Any]:
        """The arguments that were passed, by their names in the schema."""
        schema = self.func._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, self.args, strict=False)}
        return {**named, **self.kwargs}

    def unreduced(self) -> BackendCall | None:
        """The same call of a loss for its terms; None where it adds none up."""
        place = place_of_reduction(self.func, self.args, self.kwargs)
        if place is None:
            return None
        if place >= len(self.args):
            return replace(self, kwargs={**self.kwargs, REDUCTION: 0})
        return replace(self, args=(*self.args[:place], 0, *self.args[place + 1 :]))

    def describe(self) -> str:
        """One line for people."""
        parts = [_shown(value) for value in self.args]
        parts += [f"{name}={_shown(value)}" for name, value in self.kwargs.items()]
        return f"{self.name}({', '.join(parts)})"


def overload_name(func: Any) -> str:
    """As in "aten::var.correction"."""
    schema = func._schema
    return f"{schema.name}.{schema.overload_name}".removesuffix(".")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.size())}"
        if not value.is_contiguous():
            text += f" strides {list(value.stride())}"
        if value.storage_offset():
            text += f" offset {value.storage_offset()}"
        return text
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)


@dataclass
class Collected:
    """The backend calls of some samples, and what there was of operators that are not hooked."""

    calls: list[BackendCall] = field(default_factory=list)
    not_hooked: Counter[str] = field(default_factory=Counter)
    not_plain: Counter[str] = field(default_factory=Counter)


class Collector(TorchDispatchMode):
    """Keeps calls of hooked operators (None: all) of different metadata, up to a limit for each."""

    def __init__(self, hooked: set[str] | None, limit: int | None, into: Collected) -> None:
        super().__init__()
        self._hooked = hooked
        self._limit = limit
        self._into = into
        self._met: dict[Any, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._keep(func, tuple(args), dict(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = overload_name(func)
        if self._hooked is not None and name not in self._hooked:
            self._into.not_hooked[name] += 1
            return
        met = self._met[func]
        if self._limit is not None and len(met) >= self._limit:
            return
        tensors = tensors_in((args, kwargs))
        if not all(map(is_plain, tensors)):
            self._into.not_plain[name] += 1
            return
        if sum(t.untyped_storage().nbytes() for t in tensors) > LARGEST_CALL_BYTES:
            return
        described = str(tree_map(_described, (args, kwargs)))
        if described in met:
            return
        met.add(described)
        args, kwargs = detached_copy((args, kwargs))
        self._into.calls.append(BackendCall(func, args, kwargs))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, tuple(leaf.size()), leaf.stride(), leaf.device)
    return leaf


@dataclass(frozen=True)
class UserCall:
    """A call as a user makes it: a function of the database and a sample."""

    function: Callable[..., Any]
    sample: Any
    label: str

    def arguments(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copies of the sample's own."""
        s = self.sample
        copied: tuple[Any, tuple[Any, ...], dict[str, Any]] = copy(
            (s.input, tuple(s.args), dict(s.kwargs))
        )
        return copied


def user_calls(op: Any, made: Sequence[Any]) -> Iterator[UserCall]:
    """The samples' calls, and the in-place form of the first two."""
    for index, sample in enumerate(made):
        yield UserCall(op, sample, f"sample {index}")
        inplace = op.get_inplace()
        if index < 2 and inplace is not None and _all_leaves_off(sample):
            yield UserCall(inplace, _without_grad(sample), f"sample {index} in place")


def _all_leaves_off(sample: Any) -> bool:
    return not getattr(sample, "broadcasts_input", False)


def _without_grad(sample: Any) -> Any:
    return sample.transform(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
