"""Sizes that are left open in a trace, and what a compile assumes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def symbolic_tensors(
    tensors: Sequence[torch.Tensor], symbolic: Collection[tuple[int, int]]
) -> tuple[list[torch.Tensor], Any]:
    """Fake tensors of the same metadata, their (tensor, dimension) pairs of ``symbolic`` unknown.

    The sizes of ``tensors`` are their hints. Also the environment that collects what a compile then
    assumes about them. Every unknown size is taken to be at least 2.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=environment)
    fakes = []
    for index, tensor in enumerate(tensors):
        dimensions = [
            DimDynamic.DYNAMIC if (index, dimension) in symbolic else DimDynamic.STATIC
            for dimension in range(tensor.dim())
        ]
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=dimensions, constraint_sizes=[None] * tensor.dim()
        )
        # A number in a tensor of the CPU that has a source gets a symbol of its own, which no guard
        # of ours could say anything about.
        source = ConstantSource(f"tensor{index}") if tensor.dim() else None
        fakes.append(mode.from_tensor(tensor, symbolic_context=context, source=source))
    return fakes, environment


def hint(size: Any) -> int:
    """A size or stride in the call that was traced; nothing is assumed of an open one."""
    return int(size.node.hint) if hasattr(size, "node") else int(size)


def hints(sizes: Iterable[Any]) -> list[int]:
    """Each of them as `hint` has it."""
    return [hint(size) for size in sizes]


def is_open(size: Any) -> bool:
    """Whether a traced size, stride or number is not known."""
    return hasattr(size, "node")


def size_at(size: Any, values: Mapping[str, int]) -> int:
    """A traced size or stride where symbols have these ``values``, by their names."""
    if not is_open(size):
        return int(size)
    expression = size.node.expr
    return int(expression.subs({symbol: values[str(symbol)] for symbol in expression.free_symbols}))


def size_text(size: Any) -> str:
    """A size or stride of a symbolic tensor as C++ text; a symbol by its bare name."""
    from torch._inductor.codegen.cpp_utils import cexpr

    return str(cexpr(size.node.expr)) if hasattr(size, "node") else f"{int(size)}L"


def assumptions(environment: Any, names: Collection[str]) -> list[str]:
    """What was assumed about the named symbols, as C++ conditions.

    Other symbols that equal an expression of them stand for it. Raises ValueError when something
    was assumed that does not follow from them alone.
    """
    import sympy  # type: ignore[import-untyped]
    from torch._inductor.codegen.cpp_utils import cexpr
    from torch.utils._sympy.numbers import int_oo

    hidden = {s: v for s, v in environment.replacements.items() if str(s) not in names}
    conditions = [guard.expr.xreplace(hidden) for guard in environment.guards]
    if any(environment.deferred_runtime_asserts.values()):
        raise ValueError("sizes that depend on data")
    for symbol, value in environment.replacements.items():
        if str(symbol) in names:
            conditions.append(sympy.Eq(symbol, value, evaluate=False))
    texts = []
    equal: set[frozenset[Any]] = set()
    for condition in conditions:
        if condition == sympy.true:
            continue
        if isinstance(condition, sympy.Eq):
            if frozenset(condition.args) in equal:
                continue
            equal.add(frozenset(condition.args))
        if any(str(symbol) not in names for symbol in condition.free_symbols):
            raise ValueError(f"an assumption about {condition}")
        texts.append(str(cexpr(condition)))
    for symbol, bounds in environment.var_to_range.items():
        if str(symbol) in names:
            texts.append(f"{symbol} >= {max(int(bounds.lower), 2)}L")
            if bounds.upper not in (sympy.oo, int_oo):
                texts.append(f"{symbol} <= {int(bounds.upper)}L")
    return list(dict.fromkeys(texts))
