"""CUDA kernels with symbolic sizes: Inductor's wrapper for them, and the plan that is made of it.

`wrapper` reads it, as it does where sizes are fixed; here sizes, strides, offsets, grids and
integer arguments are expressions of the call's open sizes, which the hook evaluates for each call.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagercache.worker.cuda.plan import (
    MAX_ARGUMENTS,
    MAX_OBJECTS,
    MAX_TEXT,
    TritonKernel,
    argument_of,
    distinct,
    launched,
)
from eagercache.worker.cuda.sizes import (
    Expression,
    Size,
    largest,
    open_size,
    read_size,
    steps_of,
    value_of,
)
from eagercache.worker.cuda.wrapper import (
    Argument,
    FinalReduction,
    WrapperReader,
    WrapperText,
    read_wrapper,
)
from eagercache.worker.inductor.shape_plan import Symbols
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

VERSION = 1
# CudaShapePlan's limits in dispatcher/plans/cuda_shape_plan.h and admitted_calls.h.
MAX_BUFFERS = 32
MAX_OUTPUTS = 16
MAX_NUMBERS = 256
MAX_GUARDS = 64


class OpenReader(WrapperReader):
    """The same of a call some of whose sizes are open."""

    def __init__(self, inputs: Sequence[Sequence[Size]]) -> None:
        super().__init__()
        self._inputs = inputs
        self._shapes: dict[str, int] = {}  # the variable that holds an input's sizes
        self._numbers: dict[str, Size] = {}

    def size(self, node: ast.expr) -> Size:
        """A size, stride or offset."""
        return read_size(node, self._numbers)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and self._takes_number(target.id, value):
            return
        super()._assign(target, value)

    def _takes_number(self, name: str, value: ast.expr) -> bool:
        """Whether it is a number, or an input's sizes, that gets a name."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr != "size" or value.args or value.keywords:
                return False
            root = self._tensor(value.func.value).root
            if not isinstance(root, int):
                raise NotUnderstood("the sizes of a buffer")
            self._shapes[name] = root
            return True
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            root = self._shapes.get(value.value.id, -1)
            place = value.slice
            if root < 0 or not isinstance(place, ast.Constant) or type(place.value) is not int:
                return False
            if not 0 <= place.value < len(self._inputs[root]):
                raise NotUnderstood(f"the size that {name} is")
            self._numbers[name] = self._inputs[root][place.value]
            return True
        if isinstance(value, ast.Name) and value.id not in self._numbers:
            return False
        try:
            self._numbers[name] = self.size(value)
        except NotUnderstood:
            return False
        return True

    def _argument(self, node: ast.expr) -> Argument:
        if isinstance(node, ast.Name) and node.id in self._numbers:
            return self._numbers[node.id]
        if isinstance(node, ast.BinOp):
            return self.size(node)
        return super()._argument(node)


@dataclass(frozen=True)
class OpenOutput:
    """One tensor that the hook allocates and returns."""

    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]


@dataclass(frozen=True)
class OpenLaunch:
    """One kernel.

    Arguments are as the plan stores them, with sizes in the place of the numbers that it has them
    by: ("number", Size, type) and ("part", pointer, Size).
    """

    cubin: bytes
    function: str
    grid: tuple[Size, Size, Size]
    threads: int
    shared: int
    arguments: tuple[tuple[Any, ...], ...]


class _Table:
    """Numbers, each once, by their place in the plan."""

    def __init__(self) -> None:
        self._places: dict[tuple[int | str, ...], int] = {}

    def place(self, size: Size) -> int:
        return self._places.setdefault(steps_of(size), len(self._places))

    def places(self, sizes: Sequence[Size]) -> list[int]:
        return [self.place(size) for size in sizes]

    def rows(self) -> list[list[int | str]]:
        return [list(steps) for steps in self._places]


@dataclass(frozen=True)
class CudaShapePlan:
    """How to launch the kernels of a shape class.

    Attributes:
        guards: conditions on the open sizes, all of which must hold.
        pattern: the request's, unchanged.
        elements: of the call's largest tensor.
    """

    num_inputs: int
    outputs: tuple[OpenOutput, ...]
    scratch: tuple[Size, ...]  # bytes of each buffer
    launches: tuple[OpenLaunch, ...]
    conditions: tuple[Size, ...]
    guards: tuple[str, ...]  # those of them that Inductor assumed, as C++ text
    pattern: Mapping[str, Any]
    elements: Size

    def cubins(self) -> list[bytes]:
        """Each once, in the order that the plan's text numbers them."""
        return distinct(launch.cubin for launch in self.launches)

    def admits(self, values: Sequence[int]) -> bool:
        """Whether the kernel holds for these values of the open sizes."""
        return all(value_of(condition, values) for condition in self.conditions)

    def to_json(self, choice: Sequence[tuple[int, bool]]) -> str:
        """The canonical text that the manifest stores and the hook reads; without the cubins."""
        table, cubins = _Table(), self.cubins()
        rows = {
            "version": VERSION,
            "inputs": self.num_inputs,
            "outputs": [
                {
                    "dtype": output.dtype,
                    "sizes": table.places(output.sizes),
                    "strides": table.places(output.strides),
                }
                for output in self.outputs
            ],
            "scratch": table.places(self.scratch),
            "launches": [
                {
                    "object": cubins.index(launch.cubin),
                    "function": launch.function,
                    "grid": table.places(launch.grid),
                    "threads": launch.threads,
                    "shared": launch.shared,
                    "arguments": [
                        [table.place(part) if isinstance(part, Expression) else part
                         for part in argument]
                        for argument in launch.arguments
                    ],
                }
                for launch in self.launches
            ],
            "elements": table.place(self.elements),
            "guards": [list(steps_of(condition)) for condition in self.conditions],
            "pattern": self.pattern,
            "choice": [list(row) for row in choice],
        }  # fmt: skip
        numbers = table.rows()
        if len(numbers) > MAX_NUMBERS:
            raise NotUnderstood("very many numbers")
        return json.dumps({**rows, "numbers": numbers}, sort_keys=True, separators=(",", ":"))

    def with_strides(
        self, native: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]
    ) -> CudaShapePlan:
        """The plan with native's strides in dimensions of size 1, which address nothing.

        ``native`` says for a few values of the open sizes which strides native's outputs have.
        Raises NotUnderstood where no stride is right for all of them.
        """
        outputs = []
        for index, output in enumerate(self.outputs):
            answers = [(values, strides[index]) for values, strides in native]
            outputs.append(replace(output, strides=_adopted(output, answers)))
        return replace(self, outputs=tuple(outputs))


def _adopted(
    output: OpenOutput, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Size, ...]:
    strides = list(output.strides)
    for place, size in enumerate(output.sizes):
        inside: Size = 1
        if place + 1 < len(output.sizes):
            inside = output.sizes[place + 1] * output.strides[place + 1]
        around = [s * n for s, n in zip(output.strides, output.sizes, strict=True)]
        candidates = [strides[place], *((inside, 1, *around) if size == 1 else ())]
        for candidate in candidates:
            if all(value_of(candidate, values) == own[place] for values, own in answers):
                strides[place] = candidate
                break
        else:
            raise NotUnderstood("strides of an output that native gives otherwise")
    return tuple(strides)


def _names(symbols: Symbols) -> dict[str, Size]:
    return {name: open_size(index) for index, name in enumerate(symbols.names)}


def _input_sizes(symbols: Symbols) -> list[Sequence[Size]]:
    names = _names(symbols)
    return [[read_size(size, names) for size in sizes] for sizes in symbols.inputs]


def read_open(text: str, symbols: Symbols) -> WrapperText:
    """What a generated module does some of whose sizes are ``symbols``, and on what conditions.

    Raises NotUnderstood.
    """
    names, inputs = _names(symbols), _input_sizes(symbols)
    wrapper = read_wrapper(text, OpenReader(inputs))
    if wrapper.num_inputs != len(inputs):
        raise NotUnderstood("another number of inputs")
    return replace(
        wrapper,
        conditions=[*(read_size(guard, names) for guard in symbols.guards), *wrapper.conditions],
    )


def make_open_plan(
    text: WrapperText,
    kernels: Mapping[str, TritonKernel],
    symbols: Symbols,
    pattern: Mapping[str, Any],
) -> CudaShapePlan:
    """The plan of a wrapper that `read_open` has read. Raises NotUnderstood."""
    buffers, scratch = [value.buffer for value in text.outputs], text.scratch()
    pointers = {id(b): text.num_inputs + i for i, b in enumerate([*buffers, *scratch])}
    launches = []
    for call in text.calls:
        if isinstance(call, FinalReduction):
            raise NotUnderstood("a reduction that an eager operator ends")
        launches.append(_launch(*launched(call, kernels), pointers))
    conditions = dict.fromkeys(text.conditions)
    if 0 in conditions or len(conditions) > MAX_GUARDS or len(scratch) > MAX_BUFFERS:
        raise NotUnderstood("guards that never hold, or very many guards or buffers")
    if not 0 < len(buffers) <= MAX_OUTPUTS:
        raise NotUnderstood("no outputs, or very many")
    shapes = [*_input_sizes(symbols), *(value.sizes for value in text.outputs)]
    plan = CudaShapePlan(
        num_inputs=text.num_inputs,
        outputs=tuple(OpenOutput(v.buffer.dtype, v.sizes, v.strides) for v in text.outputs),
        scratch=tuple(buffer.bytes for buffer in scratch),
        launches=tuple(launches),
        conditions=tuple(c for c in conditions if isinstance(c, Expression)),
        guards=symbols.guards,
        pattern=pattern,
        elements=largest(list(map(_count, shapes))),
    )
    if len(plan.cubins()) > MAX_OBJECTS or len(plan.to_json([])) > MAX_TEXT:
        raise NotUnderstood("very many kernels or buffers")
    return plan


def _count(sizes: Sequence[Size]) -> Size:
    count: Size = 1
    for size in sizes:
        count = size * count
    return count


def _launch(
    kernel: TritonKernel,
    passed: Mapping[str, Argument],
    pointers: Mapping[int, int],
) -> OpenLaunch:
    if len(kernel.signature) + kernel.scratch_pointers > MAX_ARGUMENTS:
        raise NotUnderstood("a kernel of very many arguments")
    rows = [argument_of(kind, passed[name], pointers) for name, kind in kernel.signature.items()]
    rows += [("null",)] * kernel.scratch_pointers
    return OpenLaunch(
        kernel.cubin,
        kernel.function,
        _grid(kernel, passed),
        kernel.threads,
        kernel.shared,
        tuple(rows),
    )


def _grid(kernel: TritonKernel, passed: Mapping[str, Any]) -> tuple[Size, Size, Size]:
    statements, blocks, tuned = kernel.grid_texts()
    known: dict[str, Size] = {
        name: value
        for name, value in {**tuned, **passed}.items()
        if isinstance(value, (int, Expression))
    }
    for statement in statements:
        name, _, text = statement.partition(" = ")
        known[name] = read_size(text, known)
    x, y, z = (read_size(text, known) for text in blocks)
    return x, y, z
