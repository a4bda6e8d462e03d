"""Sizes that are left open when a module's call is traced, and what the graph assumes of them.

Guards and the outputs' strides are C++ in Inductor's own text. They become a function that is
compiled beside the kernels (`shape_function`; ModuleShapeFunction of nn_modules/record.h), so that
nothing interprets expressions when a call is answered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from eagercache.worker.compat import symbolic_shapes
from eagercache.worker.inductor.commands import CompileRefused

SHAPE_FUNCTION = "eagercache_module_shape"


def dynamic_shapes(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    arguments: Sequence[torch.Tensor],
    open_sizes: Sequence[tuple[int, int]],
) -> Any:
    """What torch.export is told; None when all sizes are known."""
    if not open_sizes:
        return None
    shapes = torch.export.ShapesCollection()
    by_tensor: dict[int, dict[int, Any]] = {}
    for tensor, dimension in open_sizes:
        by_tensor.setdefault(tensor, {})[dimension] = torch.export.Dim.AUTO
    for tensor, dimensions in by_tensor.items():
        shapes[arguments[tensor]] = dimensions
    return shapes.dynamic_shapes(module, args, dict(kwargs))


@dataclass
class SymbolicSizes:
    """What is open in a graph.

    Attributes:
        open_sizes: the (argument tensor, dimension) pairs that were left open and stayed so, in
            order; others have become numbers.
        texts: their sizes as C++, symbols by name.
        environment: collects what is assumed, until the graph is lowered.
        strides: those of the outputs, as C++.
        tied: pairs of open sizes, by their positions, that have to be equal besides.
        numbers: what else follows from the sizes, as C++, and is given behind the strides.
    """

    open_sizes: tuple[tuple[int, int], ...]
    texts: tuple[str, ...]
    environment: Any = field(repr=False)
    strides: tuple[tuple[str, ...], ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    numbers: tuple[str, ...] = ()

    def tie(self, fakes: Mapping[int, torch.Tensor], members: Collection[int]) -> None:
        """Has sizes be equal that are equal in this call, among the ``members`` of its tensors.

        Of what one object holds (keys and values of a cache): a graph alone does not say that they
        have to be, where an operator does not compare what it is given.
        """
        first: dict[int, int] = {}
        pairs = []
        for position, (tensor, dimension) in enumerate(self.open_sizes):
            if tensor in members:
                size = int(fakes[tensor].size()[dimension])
                if first.setdefault(size, position) != position:
                    pairs.append((first[size], position))
        self.tied = tuple(pairs)

    def see_outputs(self, graph: torch.fx.Graph) -> None:
        """Reads the outputs' strides."""
        (output,) = [node for node in graph.nodes if node.op == "output"]
        self.strides = tuple(
            tuple(symbolic_shapes.size_text(stride) for stride in node.meta["val"].stride())
            for node in output.args[0]
        )

    def guards(self) -> list[str]:
        """What the open sizes, s[0] and so on, have to fulfil, after the graph was lowered.

        Raises CompileRefused when that does not follow from them alone.
        """
        try:
            assumed = symbolic_shapes.assumptions(self.environment, self._symbols())
        except ValueError as error:
            raise CompileRefused(f"no kernel for several sizes: {error}") from error
        equal = [
            f"s[{index}] == ({text})"
            for index, text in enumerate(self.texts)
            if self._symbols().get(text) != index
        ]
        tied = [f"s[{one}] == s[{other}]" for one, other in self.tied]
        return [*equal, *tied, *assumed]

    def named(self, values: Sequence[int]) -> dict[str, int]:
        """What each symbol is where the open sizes have these values."""
        return {name: values[index] for name, index in self._symbols().items()}

    def _symbols(self) -> dict[str, int]:
        """The index of the first open size that each symbol is."""
        found: dict[str, int] = {}
        for index, text in enumerate(self.texts):
            if text.isidentifier():
                found.setdefault(text, index)
        return found

    def shape_function(self) -> str:
        """The function's C++, after the graph was lowered. Raises CompileRefused."""
        lines = [
            f"  [[maybe_unused]] const std::int64_t {name} = s[{index}];"
            for name, index in self._symbols().items()
        ]
        lines += [f"  if (!({condition})) return 1;" for condition in self.guards()]
        texts = [text for row in self.strides for text in row] + [*self.numbers]
        lines += [f"  o[{index}] = {text};" for index, text in enumerate(texts)]
        body = "\n".join(lines)
        return (
            f'\nextern "C" __attribute__((visibility("default"))) std::int32_t {SHAPE_FUNCTION}(\n'
            "    const std::int64_t* s, [[maybe_unused]] std::int64_t* o) noexcept {\n"
            f"{body}\n  return 0;\n}}\n"
        )


def symbolic_sizes(
    fakes: Mapping[int, torch.Tensor], open_sizes: Sequence[tuple[int, int]]
) -> SymbolicSizes:
    """What stayed open in a traced call, whose argument tensors have become ``fakes``.

    Raises CompileRefused when nothing did.
    """
    found: list[tuple[tuple[int, int], Any]] = []
    for tensor, dimension in open_sizes:
        if tensor not in fakes:
            raise CompileRefused("it does not use an argument whose size changes")
        size = fakes[tensor].size()[dimension]
        if isinstance(size, torch.SymInt):
            found.append(((tensor, dimension), size))
    if not found:
        raise CompileRefused("its forward is another program for each size")
    environment = found[0][1].node.shape_env
    return SymbolicSizes(
        open_sizes=tuple(place for place, _ in found),
        texts=tuple(symbolic_shapes.size_text(size) for _, size in found),
        environment=environment,
    )
