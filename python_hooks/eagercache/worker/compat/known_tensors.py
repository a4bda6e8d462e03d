"""Tensors that a forward makes of nothing but numbers, in traces: what they hold is known.

`torch.arange(2, x.dim()).tolist()` names axes, and `~torch.eye(n).bool()` chooses all pairs but
those of the same. TorchDynamo takes what is read of a tensor for data, on which sizes then depend.
Here the part of the graph that needs no input is computed as it grows, by native as eager does:
numbers that are read of it are constants, and a mask that chooses is put in as the indices of what
it chooses.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from eagercache.worker.compat.tensor_constants import as_tensor, as_variable

# Larger ones are no lists of axes or masks of pairs.
_MOST_ELEMENTS = 1 << 16


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions and methods whose answer is a function of what they are given, and which write into
# nothing else. Their names, since a graph has functions, builtins and methods of one operator.
_MAKE = _names("arange zeros ones full eye tensor linspace logspace tril_indices triu_indices")
_COMPUTE = _names(
    """
    zeros_like ones_like full_like new_zeros new_ones new_full tril triu diag diagonal diag_embed
    cat concat stack hstack vstack block_diag meshgrid cartesian_prod combinations repeat tile
    repeat_interleave view reshape expand unsqueeze squeeze flatten unflatten chunk split unbind
    select narrow bool float double half long int to type contiguous clone detach t transpose
    permute movedim flip roll logical_not logical_and logical_or logical_xor invert and_ or_ xor eq
    ne lt le gt ge add sub mul floordiv truediv floor_divide div mod neg pow sqrt exp log abs sign
    floor ceil round clamp remainder getitem any all sum prod max min amax amin cumsum cumprod
    argmax argmin argsort sort where masked_fill nonzero one_hot outer isin unique searchsorted
    bitwise_not bitwise_and bitwise_or bitwise_xor dim size numel __getitem__ __invert__ __and__
    __or__ __eq__ __ne__
    """
)
# The first argument of these is written into, and nothing else.
_WRITE = _names(
    """
    setitem fill_diagonal_ fill_ zero_ add_ sub_ mul_ masked_fill_ logical_not_ logical_and_
    logical_or_ copy_ scatter_
    """
)
# What these make of a known tensor and another one is new memory.
_APART = _names(
    """
    add sub mul truediv div floordiv eq ne lt le gt ge and_ or_ xor logical_and logical_or matmul mm
    bmm where cat stack masked_fill pow maximum minimum scatter scatter_add gather index_select
    cross_entropy linear
    """
)


def notice(undo: contextlib.ExitStack) -> None:
    """Until ``undo`` is closed, what a trace reads of such tensors is known."""
    from torch._dynamo.variables import BuiltinVariable, TensorVariable

    known = _Known()
    for owner, name, rule in (
        (TensorVariable, "call_method", _method),
        (BuiltinVariable, "call_function", _calling),
        # Newer torch has slots for these.
        (TensorVariable, "nb_float_impl", _reading("__float__")),
        (TensorVariable, "nb_int_impl", _reading("__int__")),
        (TensorVariable, "nb_bool_impl", _reading("__bool__")),
        (TensorVariable, "mp_subscript_impl", _choosing),
        (TensorVariable, "mp_ass_subscript_impl", _choosing),
    ):
        original = vars(owner).get(name)
        if original is not None:
            setattr(owner, name, rule(original, known))
            undo.callback(setattr, owner, name, original)


class _Known:
    """The tensors of the graph that is traced whose values are known, by its nodes."""

    def __init__(self) -> None:
        self._graph: torch.fx.Graph | None = None
        self._values: dict[torch.fx.Node, Any] = {}
        self._seen: set[torch.fx.Node] = set()

    def of(self, variable: Any, tx: Any) -> torch.Tensor | None:
        """What the variable's tensor holds now; None where a call may say."""
        tracer = tx.output.current_tracer
        if tracer is not tx.output.root_tracer:  # a block has a graph of its own
            return None
        node = variable.as_proxy().node
        if tracer.graph is not self._graph:
            self._graph, self._values, self._seen = tracer.graph, {}, set()
        if node.graph is not tracer.graph:
            return None
        with _as_eager():
            for each in tracer.graph.nodes:
                if each not in self._seen:
                    self._seen.add(each)
                    self._take(each)
        value = self._values.get(node)
        return value if isinstance(value, torch.Tensor) else None

    def _take(self, node: torch.fx.Node) -> None:
        """Computes what a node does with known tensors, or forgets those that it may change."""
        name = _name(node)
        known = [part for part in node.all_input_nodes if part in self._values]
        alone = len(known) == len(node.all_input_nodes)
        if alone and (known or name in _MAKE) and _is_computed(node, name):
            try:
                self._values[node] = value = self._compute(node)
            except Exception:
                self._forget(known)
                return
            if not _is_as_traced(value, node):
                self._forget([*known, node])
        elif known and not self._is_apart(node, name, known):
            self._forget(known)

    def _compute(self, node: torch.fx.Node) -> Any:
        given, named = torch.fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if node.op == "call_method":
            return getattr(given[0], str(node.target))(*given[1:], **named)
        target: Any = node.target
        return target(*given, **named)

    def _is_apart(self, node: torch.fx.Node, name: str, known: list[torch.fx.Node]) -> bool:
        """Whether a node with unknown inputs leaves known tensors as they are, and no view."""
        if "out" in node.kwargs or node.op not in ("call_function", "call_method"):
            return node.op == "output"
        if name in ("getitem", "__getitem__", *_WRITE):
            return node.args[0] not in known
        return name in _APART

    def _forget(self, nodes: list[torch.fx.Node]) -> None:
        """Nothing is known any more of what lies in the memory of these."""
        memory = {
            tensor.untyped_storage().data_ptr()
            for node in nodes
            for tensor in _tensors(self._values.get(node))
        }
        for node, value in list(self._values.items()):
            if node in nodes or any(
                tensor.untyped_storage().data_ptr() in memory for tensor in _tensors(value)
            ):
                del self._values[node]


def _is_computed(node: torch.fx.Node, name: str) -> bool:
    """Whether a node may be computed here, by its operator and its size."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    if not (name in _MAKE or name in _COMPUTE or name in _WRITE):
        return False
    made = node.meta.get("example_value")
    if name == "setitem" or not isinstance(made, torch.Tensor):
        return made is None or isinstance(made, (tuple, list, int, torch.Size))
    counted = not made.is_floating_point() or not any(map(torch.is_autocast_enabled, _DEVICES))
    return counted and _elements(made) <= _MOST_ELEMENTS


_DEVICES = ("cpu", "cuda")


def _elements(made: torch.Tensor) -> int:
    """Those of a fake tensor; more than any where they are not known."""
    count = made.numel()
    return count if isinstance(count, int) else _MOST_ELEMENTS + 1


def _is_as_traced(value: Any, node: torch.fx.Node) -> bool:
    """Whether a tensor is what the trace has for it, but for its values."""
    made = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(made, torch.Tensor):
        return isinstance(value, torch.Tensor) == isinstance(made, torch.Tensor)
    same = (value.dtype, value.device.type) == (made.dtype, made.device.type)
    return same and tuple(value.shape) == tuple(made.shape)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _name(node: torch.fx.Node) -> str:
    """What a node calls, where that is PyTorch's own or Python's; "" for anything else."""
    if node.op == "call_method":
        return str(node.target)
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, _DISPATCHED):
        return ""
    of_torch = str(getattr(target, "__module__", None) or "torch").partition(".")[0] in _KNOWN_CODE
    return str(getattr(target, "__name__", "")) if of_torch else ""


# An operator of the program's own may have any name.
_DISPATCHED = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
_KNOWN_CODE = frozenset(("torch", "_operator", "builtins", "math"))


@contextlib.contextmanager
def _as_eager() -> Iterator[None]:
    """A block that computes with real tensors, whatever is traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        yield


# ---- what Dynamo asks ----------------------------------------------------------------------------

_Rule = Callable[[Any, _Known], Any]


def _reading(method: str) -> _Rule:
    """Reads the values of a tensor."""

    def rule(original: Any, known: _Known) -> Any:
        @functools.wraps(original)
        def read(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            value = None if args or kwargs else known.of(variable, tx)
            if value is None:
                return original(variable, tx, *args, **kwargs)
            return _constant(tx, value, method)

        return read

    return rule


def _method(original: Any, known: _Known) -> Any:
    """A method of a tensor is called."""

    @functools.wraps(original)
    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("item", "tolist", "nonzero") and not args and not kwargs:
            value = known.of(variable, tx)
            if value is not None:
                return _constant(tx, value, name)
        if name in ("__getitem__", "__setitem__") and args:
            args = [_chosen(variable, tx, args[0], known), *args[1:]]
        return original(variable, tx, name, args, kwargs)

    return call_method


def _constant(tx: Any, value: torch.Tensor, method: str) -> Any:
    with _as_eager():
        found = getattr(value, method)()
    if isinstance(found, torch.Tensor):
        return as_tensor(tx, found)
    return as_variable(found)


def _calling(original: Any, known: _Known) -> Any:
    """A builtin is called: one that reads a number, or chooses."""
    from torch._dynamo.variables import TensorVariable

    @functools.wraps(original)
    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if kwargs or variable.fn not in _BUILTINS:
            return original(variable, tx, args, kwargs)
        parts = [part.realize() for part in args]
        if variable.fn is operator.getitem and len(parts) == 2:
            if isinstance(parts[0], TensorVariable):
                parts[1] = _chosen(parts[0], tx, parts[1], known)
        elif len(parts) == 1 and isinstance(parts[0], TensorVariable):
            value = known.of(parts[0], tx)
            if value is not None:
                return _constant(tx, value, f"__{variable.fn.__name__}__")
        return original(variable, tx, parts, kwargs)

    return call_function


_BUILTINS = (int, float, bool, operator.getitem)


def _choosing(original: Any, known: _Known) -> Any:
    """Elements are chosen, or written, by a key."""

    @functools.wraps(original)
    def by_key(variable: Any, tx: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        return original(variable, tx, _chosen(variable, tx, key, known), *args, **kwargs)

    return by_key


def _chosen(variable: Any, tx: Any, key: Any, known: _Known) -> Any:
    """``key``, or the indices that a known mask of the first dimensions stands for."""
    from torch._dynamo.variables import TensorVariable, TupleVariable

    key = key.realize()
    if not isinstance(key, TensorVariable):
        return key
    mask = key.as_proxy().node.meta.get("example_value")
    whole = variable.as_proxy().node.meta.get("example_value")
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() == 0:
        return key
    fits = isinstance(whole, torch.Tensor) and tuple(whole.shape[: mask.dim()]) == tuple(mask.shape)
    value = known.of(key, tx) if fits else None
    if value is None:
        return key
    with _as_eager():
        indices = value.nonzero(as_tuple=True)
    return TupleVariable([as_tensor(tx, index) for index in indices])
