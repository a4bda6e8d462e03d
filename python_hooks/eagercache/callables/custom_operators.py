"""Operators made of Python functions: `op`, and what makes others known (`function_operator`)."""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from eagercache.base.config import WORKER_VARIABLE
from eagercache.callables.function_operator import CustomOperator, registry

_P = ParamSpec("_P")
_R = TypeVar("_R")


class AdoptedOperator(CustomOperator[Any, Any]):
    """An operator that `torch.library.custom_op` made of one Python function for all devices."""

    always = False

    def _define(self, tags: Sequence[torch.Tag]) -> None:
        registry[self.name] = self
        self._hook()


def adopt(name: str) -> None:
    """Makes it known what function an existing operator is made of, where that can be found."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    if name in registry or definition is None:
        return
    function = getattr(definition, "_init_fn", None)
    implementations = getattr(definition, "_backend_fns", {})
    if set(implementations) != {None} or not isinstance(function, types.FunctionType):
        return
    adopted = AdoptedOperator(function, name, definition._schema, autograd=False)
    adopted.identify()


# ---- operators of torch.library that a module calls, on their way to a worker -------------------


def reduced(definition: torch.library.CustomOpDef) -> tuple[Any, ...] | None:
    """How an operator of `torch.library.custom_op` is pickled; None where it cannot be.

    That of a script travels as its functions; others are found where they are defined.
    """
    module = str(definition._init_fn.__module__)
    if module != "__main__":
        return _imported, (module, definition._qualname)
    if set(definition._backend_fns) != {None}:
        return None
    functions = (definition._init_fn, definition._abstract_fn)
    return _defined, (definition._qualname, definition._schema, *functions)


def of_script() -> list[torch.library.CustomOpDef]:
    """The operators that the program's `__main__` defined, which it may call by their names."""
    from torch._library.custom_ops import OPDEFS

    found = [one for one in OPDEFS.values() if one._init_fn.__module__ == "__main__"]
    return [one for one in found if reduced(one) is not None]


def _imported(module: str, name: str) -> torch.library.CustomOpDef:
    from torch._library.custom_ops import OPDEFS

    importlib.import_module(module)
    return OPDEFS[name]


def _defined(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any] | None
) -> torch.library.CustomOpDef:
    made = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
    if fake is not None:
        made.register_fake(fake)
    return made


def find(name: str) -> CustomOperator[Any, Any] | None:
    """The operator of that name, or the one whose backward has it."""
    return registry.get(name)


def fit_hooks() -> Iterable[tuple[tuple[str, str], str]]:
    """The hooks of all that `op` made and kernels may answer, their functions read anew."""
    for operator in dict.fromkeys(registry.values()):
        if operator.always and operator.identify():
            yield from operator.hooks()


def rebuild(payload: dict[str, Any], digest: str) -> CustomOperator[Any, Any]:
    """In a worker: the operator of a payload, its function put into place."""
    from eagercache.callables import function_transfer

    function = function_transfer.unpack(payload["pickle"])
    known = registry.get(payload["name"])
    if known is not None and known.schema == payload["schema"]:
        known.replace(function)
    else:
        known = CustomOperator(
            function,
            payload["name"],
            payload["schema"],
            autograd=payload["autograd"],
            in_worker=True,
        )
    known._adopt(digest, frozenset(payload["codes"]))
    return known


def op(
    name: str,
    *,
    schema: str | None = None,
    mutates_args: Iterable[str] = (),
    autograd: bool = True,
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Callable[_P, _R]], CustomOperator[_P, _R]]:
    """Makes a function of tensors and scalars an operator that one kernel answers.

    The function answers each call until its kernel is compiled, proved equal and found faster, and
    wherever a kernel may not: under function transforms, for sparse tensors and the like. Its
    gradient is made of the function too; see `CustomOperator.register_autograd` for another one.
    The operator works in `torch.compile` and `torch.export`, where it is one node.

    Args:
        name: "namespace::name", of a namespace of your own.
        schema: "(Tensor x, float eps=1e-6) -> Tensor"; by default read from the type hints.
        mutates_args: names of the arguments that the function writes to. Such an operator is always
            answered by the function.
        autograd: whether gradients are wanted.
        tags: of `torch.Tag`, for the operator.

    A function whose result depends on more than its arguments, that branches on values, writes to
    an argument or has other effects is not compiled: a warning names the line, and it goes on
    answering itself. Where nothing is enabled yet, the first call of the operator enables kernels
    for it alone, as `enable(ops=())` does.

    Raises:
        ValueError: no such name can be, or another schema has it already.
        TypeError: the name is no text, as where the decorator is written without parentheses.
    """
    if not isinstance(name, str):
        raise TypeError(f"write @eagercache.op('namespace::name'), not @eagercache.op: {name!r}")
    space, separator, short = name.partition("::")
    if not (separator and space.isidentifier() and short.isidentifier()):
        raise ValueError(f"an operator is named 'namespace::name', not {name!r}")
    if space in ("aten", "prims", "prim"):
        raise ValueError(f"the namespace {space!r} is PyTorch's own")
    written = tuple(mutates_args)

    def decorate(function: Callable[_P, _R]) -> CustomOperator[_P, _R]:
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"an operator is made of a Python function, not of {function!r}")
        try:
            text = schema or torch.library.infer_schema(function, mutates_args=written)
        except ValueError as error:
            raise ValueError(
                f"{name}: {error}; annotate what it takes and returns, or name a schema="
            ) from error
        known = registry.get(name)
        if known is not None:
            if known.name != name or known.schema != text:
                raise ValueError(f"{name} exists already, as {known.name}{known.schema}")
            known.replace(function)
            known.look()
            return cast(CustomOperator[_P, _R], known)
        differentiable = autograd and not written and "!" not in text
        made = CustomOperator(function, name, text, autograd=differentiable, tags=tags)
        made.look()
        return cast(CustomOperator[_P, _R], made)

    return decorate


def in_worker() -> bool:
    """Whether this process compiles for another."""
    return bool(os.environ.get(WORKER_VARIABLE))


def pickled_of_script(pickled: Callable[[Any], bytes]) -> tuple[list[bytes], list[str]]:
    """What a module of a script may call by name: operators in Python, and libraries of others.

    Where one cannot be ``pickled``, a module that calls it is refused for that.
    """
    operators = []
    for definition in of_script():
        with contextlib.suppress(Exception):
            operators.append(pickled(definition))
    # A package loads its own when it is imported.
    loaded = sorted(map(str, torch.ops.loaded_libraries))
    return operators, [path for path in loaded if "site-packages" not in path]
