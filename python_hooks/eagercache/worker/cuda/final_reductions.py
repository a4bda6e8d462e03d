"""Launches in the place of the eager operators that add up a kernel's partial results.

Inductor reads the gradient of a norm once for the sums over its rows and those over its columns;
of the latter each block leaves a row of its own, and an eager operator behind the kernel makes one
of them. The same is made of a small graph here, which Inductor turns into kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from eagercache.worker.cuda.plan import TritonKernel
from eagercache.worker.cuda.wrapper import (
    Argument,
    Buffer,
    Call,
    FinalReduction,
    Value,
    WrapperText,
    fixed,
)
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

# Of a graph and its inputs: what its wrapper does, and its tuned kernels by name.
Lowering = Callable[
    [torch.fx.GraphModule, tuple[torch.Tensor, ...]], tuple[WrapperText, Mapping[str, TritonKernel]]
]


def with_launches(
    text: WrapperText, kernels: Mapping[str, TritonKernel], lower: Lowering
) -> tuple[WrapperText, dict[str, TritonKernel]]:
    """``text`` whose final reductions are launches, and ``kernels`` with theirs.

    Raises NotUnderstood where a reduction's own text is not.
    """
    calls: list[Call | FinalReduction] = []
    buffers, known = list(text.buffers), dict(kernels)
    made: dict[tuple[Any, ...], tuple[WrapperText, Mapping[str, TritonKernel]]] = {}
    for call in text.calls:
        if isinstance(call, Call):
            calls.append(call)
            continue
        kind = (call.operation, call.source.sizes, call.target.buffer.dtype)
        if kind not in made:
            made[kind] = lower(*_graph_of(call))
        own, own_kernels = made[kind]
        if own.num_inputs != 1 or len(own.outputs) != 1:
            raise NotUnderstood("a final reduction of several tensors")
        prefix = f"final {list(made).index(kind)} "
        known.update({prefix + name: kernel for name, kernel in own_kernels.items()})
        scratch = {id(buffer): Buffer(buffer.dtype, buffer.bytes) for buffer in own.scratch()}
        buffers += scratch.values()
        for launch in own.calls:
            if not isinstance(launch, Call):
                raise NotUnderstood("a final reduction of a final reduction")
            arguments = tuple(
                _placed(argument, call, own, scratch) for argument in launch.arguments
            )
            calls.append(Call(prefix + launch.kernel, arguments))
    return replace(text, buffers=buffers, calls=calls), known


def _placed(
    argument: Argument,
    call: FinalReduction,
    own: WrapperText,
    scratch: Mapping[int, Buffer],
) -> Argument:
    """An argument of the small graph's launch, in the buffers of the large one."""
    if not isinstance(argument, Value):
        return argument
    if isinstance(argument.root, int):
        return replace(call.source, offset=call.source.offset + argument.offset)
    if argument.root is own.outputs[0].root:
        return replace(call.target, offset=argument.offset)
    return replace(argument, root=scratch[id(argument.root)])


def _graph_of(call: FinalReduction) -> tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    """The reduction as a graph of one tensor, and data for it."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    node = graph.placeholder("rows")
    operator = {"sum": aten.sum.dim_IntList, "amin": aten.amin.default, "amax": aten.amax.default}
    node = graph.call_function(operator[call.operation], (node, [0]))
    dtype = getattr(torch, call.target.buffer.dtype)
    if dtype is not torch.float32:
        node = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    graph.output((node,))
    return torch.fx.GraphModule({}, graph), (example_rows(tuple(map(fixed, call.source.sizes))),)


def example_rows(sizes: tuple[int, ...]) -> torch.Tensor:
    """Data that the small graph is lowered and tuned on."""
    return torch.zeros(sizes, dtype=torch.float32, device="cuda")
