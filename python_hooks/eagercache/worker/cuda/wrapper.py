"""The Python wrapper that Inductor generates for CUDA, read into buffers and launches.

``call(args)`` is read statement by statement: what it allocates, views, launches and returns. A
statement that is not one of the few forms below raises `NotUnderstood`, and native stays. Known to
read the text of torch 2.11.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from eagercache.worker.cuda.sizes import Expression, Size, at_most, equal
from eagercache.worker.inductor.launch_plan import Output
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.inductor.wrapper_text import ITEM_SIZES


@dataclass(eq=False)
class Buffer:
    """Memory that the wrapper allocates."""

    dtype: str
    bytes: Size


@dataclass(frozen=True)
class Value:
    """A tensor variable: an input (by its index), or (part of) a buffer."""

    root: int | Buffer
    sizes: tuple[Size, ...] = ()
    strides: tuple[Size, ...] = ()
    offset: Size = 0  # elements

    @property
    def reach(self) -> Size:
        """Elements from the first to the last one, both included."""
        if 0 in self.sizes:
            return 0
        reach: Size = 1
        for size, stride in zip(self.sizes, self.strides, strict=True):
            reach = (size - 1) * stride + reach
        return reach

    @property
    def buffer(self) -> Buffer:
        """Of what is not an input."""
        if isinstance(self.root, int):
            raise NotUnderstood("an input is viewed or returned")
        return self.root


@dataclass(frozen=True)
class Number:
    """The number in the input ``index``, a 0-dim CPU tensor."""

    index: int


@dataclass(frozen=True)
class Scalar:
    """The number ``index`` of those of the call that the kernels take, or 1 by it."""

    index: int
    kind: str = "scalar"  # or "inverse"


# The arrays of these in a text that `scalar_text.py` has made, and their elements' kind.
SCALAR_ARRAYS = {"eagercache_scalars": "scalar", "eagercache_inverses": "inverse"}

Argument = Value | Number | Scalar | Size | float


@dataclass(frozen=True)
class Call:
    """One launch: the wrapper's name for the kernel, and what it passes by position."""

    kernel: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class FinalReduction:
    """What an eager operator makes of a kernel's partial results: one row of all ``source`` rows.

    It is a kernel that reduces over rows and columns at once that leaves them (Inductor's "mix
    order reduction"): [rows, columns] of float32 in a workspace. `final_reductions.py` makes
    launches of it.
    """

    operation: str  # "sum", "amin" or "amax"
    source: Value
    target: Value


@dataclass
class WrapperText:
    """What ``call(args)`` does."""

    num_inputs: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    calls: list[Call | FinalReduction] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    conditions: list[Size] = field(default_factory=list)  # of open sizes, all of which must hold

    def output_specs(self) -> tuple[Output, ...]:
        """The tensors that the hook allocates and returns, of fixed sizes."""
        return tuple(
            Output(v.buffer.dtype, tuple(map(fixed, v.sizes)), tuple(map(fixed, v.strides)))
            for v in self.outputs
        )

    def scratch(self) -> list[Buffer]:
        """Buffers that are not returned."""
        returned = {id(value.buffer) for value in self.outputs}
        return [buffer for buffer in self.buffers if id(buffer) not in returned]


def fixed(size: Size) -> int:
    """A number that no open size is in."""
    if not isinstance(size, int):
        raise NotUnderstood("an open size")
    return size


def read_wrapper(text: str, reader: WrapperReader | None = None) -> WrapperText:
    """What the generated module's ``call`` does, by a new ``reader``. Raises NotUnderstood."""
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    if len(calls) != 1:
        raise NotUnderstood("no call(args)")
    reader = reader or WrapperReader()
    for statement in calls[0].body:
        reader.read(statement)
    return reader.finish()


# As simd.py writes it: "workspace_0[1 * 128 * 4096:(1 + 1) * 128 * 4096].view(128, 4096)
# .sum(dim=0).to(torch.bfloat16)", in one line and as ast.unparse spells it.
_FINAL = re.compile(
    r"(?P<workspace>workspace_\d+)\[(?P<index>\d+) \* (?P<rows>\d+) \* (?P<columns>\d+):"
    r"\((?P<again>\d+) \+ 1\) \* (?P<rows2>\d+) \* (?P<columns2>\d+)\]"
    r"\.view\((?P<rows3>\d+), (?P<columns3>\d+)\)"
    r"\.(?P<operation>sum|amin|amax)\(dim=0\)(?:\.to\(torch\.(?P<dtype>\w+)\))?"
)

# What the wrapper does to its own arguments, or checks of what the key says.
_NO_EFFECT = {
    "args.clear",
    "torch.cuda.set_device",
    "assert_size_stride",
    "assert_size_stride_grouped",  # from torch 2.12 on
}


class WrapperReader:
    """State of the walk over the statements of a call of fixed sizes."""

    def __init__(self) -> None:
        self._text = WrapperText()
        self._values: dict[str, Value] = {}
        self._streams: set[str] = set()
        self._returned = False

    def read(self, statement: ast.stmt) -> None:
        """The next statement. Raises NotUnderstood."""
        if self._returned:
            raise NotUnderstood("a statement after the return")
        if isinstance(statement, ast.With):
            guard = _source(statement.items[0].context_expr)
            if len(statement.items) != 1 or not guard.startswith("torch.cuda._DeviceGuard("):
                raise NotUnderstood(f"with {guard[:60]}")
            for inner in statement.body:
                self.read(inner)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._expression(statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._values.pop(_name(target), None)
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            self._text.outputs = [self._tensor(element) for element in statement.value.elts]
            self._returned = True
        else:
            raise NotUnderstood(f"statement {_source(statement)[:100]}")

    def finish(self) -> WrapperText:
        """What all of them do. Raises NotUnderstood."""
        text = self._text
        if not self._returned or not text.calls:
            raise NotUnderstood("no call of a kernel, or no return")
        roots = [id(value.buffer) for value in text.outputs]
        if len(set(roots)) != len(roots):
            raise NotUnderstood("outputs that share memory")
        for value in text.outputs:
            whole = value.reach * ITEM_SIZES[value.buffer.dtype]
            self._demand(equal(value.offset, 0), "an output that begins within a buffer")
            self._demand(equal(whole, value.buffer.bytes), "an output that is part of a buffer")
        return text

    def _demand(self, holds: Size, what: str) -> None:
        """Refuses what does not hold; what depends on open sizes becomes a condition."""
        if isinstance(holds, Expression):
            self._text.conditions.append(holds)
        elif not holds:
            raise NotUnderstood(what)

    def size(self, node: ast.expr) -> Size:
        """A size, stride or offset."""
        return fixed(_number(node))

    def sizes(self, node: ast.expr) -> tuple[Size, ...]:
        """Several of them."""
        if not isinstance(node, ast.Tuple):
            raise NotUnderstood(f"sizes {_source(node)[:80]}")
        return tuple(self.size(element) for element in node.elts)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(value, ast.Name) and value.id == "args":
            inputs = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            for index, element in enumerate(inputs):
                self._values[_name(element)] = Value(index)
            self._text.num_inputs = len(inputs)
            return
        name = _name(target)
        if isinstance(value, ast.Call) and _source(value.func) == "get_raw_stream":
            self._streams.add(name)
        elif isinstance(value, ast.Call) and _source(value.func) == "empty_strided_cuda":
            self._values[name] = self._allocate(value)
        elif isinstance(value, ast.Call) and _source(value.func) == "copy_if_misaligned":
            # Misaligned tensors are refused before this.
            self._values[name] = self._tensor(value.args[0])
        elif (reduced := _FINAL.fullmatch(_source(value))) is not None:
            self._values[name] = self._reduce(reduced)
        else:
            self._values[name] = self._tensor(value)

    def _allocate(self, call: ast.Call) -> Value:
        sizes, strides, dtype = call.args
        name = _source(dtype).removeprefix("torch.")
        shape = self.sizes(sizes), self.sizes(strides)
        if name not in ITEM_SIZES or call.keywords:
            raise NotUnderstood(f"allocation {_source(call)[:80]}")
        size = Value(0, *shape).reach * ITEM_SIZES[name]
        if size == 0:
            raise NotUnderstood("an empty buffer")
        buffer = Buffer(name, size)
        self._text.buffers.append(buffer)
        return Value(buffer, *shape)

    def _reduce(self, text: re.Match[str]) -> Value:
        """The new buffer that a final reduction fills."""
        workspace = self._values.get(text["workspace"])
        if workspace is None or isinstance(workspace.root, int):
            raise NotUnderstood("a final reduction of an input")
        rows, columns = int(text["rows"]), int(text["columns"])
        index = int(text["index"])
        slices = {int(text[name]) for name in ("again", "rows2", "rows3")} - {index, rows}
        columns_said = {int(text[name]) for name in ("columns2", "columns3")}
        end = (index + 1) * rows * columns * ITEM_SIZES["float32"]
        if slices or columns_said != {columns} or end > fixed(workspace.root.bytes):
            raise NotUnderstood("the rows of a final reduction")
        if workspace.root.dtype != "float32" or workspace.offset:
            raise NotUnderstood("a workspace that is not of float32")
        dtype = text["dtype"] or "float32"
        if dtype not in ITEM_SIZES:
            raise NotUnderstood(f"a final reduction to {dtype}")
        buffer = Buffer(dtype, columns * ITEM_SIZES[dtype])
        self._text.buffers.append(buffer)
        target = Value(buffer, (columns,), (1,))
        source = Value(workspace.root, (rows, columns), (columns, 1), index * rows * columns)
        self._text.calls.append(FinalReduction(text["operation"], source, target))
        return target

    def _tensor(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            if node.id not in self._values:
                raise NotUnderstood(f"unknown tensor {node.id}")
            return self._values[node.id]
        if isinstance(node, ast.Call) and _source(node.func) == "reinterpret_tensor":
            base = self._tensor(node.args[0])
            sizes, strides = self.sizes(node.args[1]), self.sizes(node.args[2])
            value = Value(base.root, sizes, strides, base.offset + self.size(node.args[3]))
            if isinstance(base.root, int):
                self._demand(equal(value.offset, 0), "a view of an input at an offset")
            else:
                end = (value.offset + value.reach) * ITEM_SIZES[base.root.dtype]
                self._demand(at_most(end, base.root.bytes), "a view that leaves its buffer")
                self._demand(at_most(0, value.offset), "a view that begins before its buffer")
            return value
        raise NotUnderstood(f"tensor {_source(node)[:80]}")

    def _expression(self, call: ast.Call) -> None:
        function = _source(call.func)
        if function in _NO_EFFECT:
            return
        if not function.endswith(".run") or not isinstance(call.func, ast.Attribute):
            raise NotUnderstood(f"call of {function[:80]}")
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if set(keywords) != {"stream"} or _source(keywords["stream"]) not in self._streams:
            raise NotUnderstood("a launch on another stream")
        self._text.calls.append(
            Call(
                kernel=_name(call.func.value),
                arguments=tuple(self._argument(node) for node in call.args),
            )
        )

    def _argument(self, node: ast.expr) -> Argument:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "item" and not node.args:
                value = self._tensor(node.func.value)
                if not isinstance(value.root, int):
                    raise NotUnderstood("a number out of a buffer")
                return Number(value.root)
            raise NotUnderstood(f"argument {_source(node)[:80]}")
        if isinstance(node, (ast.Name, ast.Call)):
            return self._tensor(node)
        if isinstance(node, ast.Subscript) and _source(node.value) in SCALAR_ARRAYS:
            return Scalar(_number(node.slice), SCALAR_ARRAYS[_source(node.value)])
        return _number(node)


def _source(node: ast.AST) -> str:
    return ast.unparse(node)


def _name(node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        raise NotUnderstood(f"name {_source(node)[:80]}")
    return node.id


def _number(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise NotUnderstood(f"number {_source(node)[:80]}")
    return value
