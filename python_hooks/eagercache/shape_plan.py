"""The plan of a kernel with symbolic sizes, read out of AOTInductor's wrapper.

As `launch_plan` does, `run_impl` is read statement by statement; here sizes, strides and arguments
are C++ expressions over the call's symbolic sizes. They are not evaluated here: they go, as text,
into a second function beside the kernels, which checks the guards and gives the hook the numbers
that it allocates by. The same text is evaluated in Python only to compare it with native's answer.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .launch_plan import (
    ITEM_SIZES,
    NotUnderstood,
    kernel_names,
    namespace_body,
    split_arguments,
    statements,
)

VERSION = 1
ENTRY_PREFIX = "eagercache_kernel_"
SHAPE_PREFIX = "eagercache_shape_"
_MAX_RANK = 16


@dataclass(frozen=True)
class Output:
    """One tensor that the hook allocates and returns; sizes and strides are C++ text."""

    dtype: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class ShapePlan:
    """How to launch the kernels of a shape class, and their source.

    Attributes:
        entry, shape: the functions' names; dispatcher/shape_plan.h says what they do.
        guards: C++ conditions on the symbols, all of which must hold.
        pattern: the request's, unchanged.
        symbols: the symbols' names in the text, in the pattern's order.
    """

    entry: str
    shape: str
    num_inputs: int
    outputs: tuple[Output, ...]
    scratch: tuple[str, ...]  # bytes of each buffer
    guards: tuple[str, ...]
    pattern: Mapping[str, Any]
    symbols: tuple[str, ...]
    source: str = field(repr=False)

    def to_json(self, choice: Sequence[tuple[int, bool]]) -> str:
        """The canonical text that the manifest stores and the hook reads; without the source."""
        return json.dumps(
            {
                "version": VERSION,
                "entry": self.entry,
                "shape": self.shape,
                "inputs": self.num_inputs,
                "outputs": [{"dtype": o.dtype, "rank": len(o.sizes)} for o in self.outputs],
                "scratch": len(self.scratch),
                "pattern": self.pattern,
                "choice": [list(row) for row in choice],
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    def admits(self, values: Sequence[int]) -> bool:
        """Whether the guards hold for these values of the symbols."""
        named = dict(zip(self.symbols, values, strict=True))
        return all(evaluate(guard, named) for guard in self.guards)


@dataclass(frozen=True)
class Symbols:
    """What is symbolic in a call, and under which conditions its kernel holds.

    Attributes:
        names: C++ names of the symbols, in the pattern's order.
        inputs: for every tensor of the call its sizes as C++ text.
        guards: C++ conditions on the symbols.
    """

    names: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    guards: tuple[str, ...]


def read_shape_plan(
    wrapper: str,
    kernel: str,
    symbols: Symbols,
    pattern: Mapping[str, Any],
    native: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
) -> ShapePlan:
    """The plan of two generated texts. Raises NotUnderstood.

    ``native`` says for a few values of the symbols which strides native's outputs have: where they
    differ from the text's in dimensions of size 1, which address nothing, native's are taken.
    """
    reader = _Reader(frozenset(kernel_names(kernel)), symbols)
    for statement in statements(wrapper):
        reader.read(statement)
    outputs = [
        _adopt(output, index, symbols.names, native)
        for index, output in enumerate(reader.outputs())
    ]
    return _assemble(reader, outputs, namespace_body(kernel), symbols, pattern)


def _adopt(
    output: Output,
    index: int,
    names: Sequence[str],
    native: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
) -> Output:
    """``output`` with the strides of its dimensions of size 1 as native has them."""
    strides = list(output.strides)
    for dimension, size in enumerate(output.sizes):
        if evaluate(size, {}) != 1:
            continue
        following = (
            f"({output.sizes[dimension + 1]})*({strides_of(output)[dimension + 1]})"
            if dimension + 1 < len(output.sizes)
            else "1L"
        )
        for candidate in (strides[dimension], following, "1L"):
            if all(
                evaluate(candidate, dict(zip(names, values, strict=True)))
                == answers[index][dimension]
                for values, answers in native
            ):
                strides[dimension] = candidate
                break
    return replace(output, strides=tuple(strides))


def strides_of(output: Output) -> tuple[str, ...]:
    """The strides that a contiguous tensor of the output's sizes has."""
    strides = ["1L"]
    for size in reversed(output.sizes[1:]):
        strides.insert(0, f"({size})*({strides[0]})" if strides[0] != "1L" else size)
    return tuple(strides)


def extent(sizes: Sequence[str], strides: Sequence[str]) -> str:
    """Elements from the first to the last one that a tensor reaches, both included."""
    terms = [
        "1L",
        *(f"(({n}) - 1)*({s})" for n, s in zip(sizes, strides, strict=True) if n != "1L"),
    ]
    return " + ".join(terms)


# What the expressions consist of.
_EXPRESSION = re.compile(r"[\w\s+\-*/%()<>=!&|?:,.]+")
_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "c10::div_floor_integer": operator.floordiv,
    "std::max": max,
    "std::min": min,
}


def evaluate(text: str, values: Mapping[str, int]) -> int | None:
    """The value of a C++ integer expression; None where it is not known or not understood."""
    python = re.sub(r"\b(\d+)L+\b", r"\1", text)
    python = re.sub(r"static_cast<int64_t>", "", python)
    for name in _FUNCTIONS:
        python = python.replace(name, name.replace("::", "_"))
    python = python.replace("&&", " and ").replace("||", " or ")
    try:
        return _value(ast.parse(python.strip(), mode="eval").body, values)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return None


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _value(node: ast.AST, values: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, values)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Mod):  # truncates in C++
            return int(math.fmod(left, right))
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _value(node.left, values), _value(node.comparators[0], values)
        return _OPERATORS[type(node.ops[0])](left, right)
    if isinstance(node, ast.BoolOp):
        parts = [bool(_value(part, values)) for part in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
        left, right = (_value(argument, values) for argument in node.args)
        return _FUNCTIONS[node.func.id.replace("_", "::", 1)](left, right)
    raise TypeError(f"{type(node).__name__} in an expression")


@dataclass(frozen=True, eq=False)
class _Buffer:
    dtype: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class _Value:
    """A tensor variable of the wrapper: an input or (part of) a buffer."""

    root: int | _Buffer
    sizes: tuple[str, ...] = ()
    strides: tuple[str, ...] = ()
    offset: str = "0L"  # elements

    @property
    def buffer(self) -> _Buffer:
        if isinstance(self.root, int):
            raise NotUnderstood("an input is viewed or returned")
        return self.root


class _Reader:
    """State of the walk over run_impl's statements."""

    def __init__(self, kernels: frozenset[str], symbols: Symbols) -> None:
        self._kernels = kernels
        self._symbols = symbols
        self.num_inputs = -1
        self._arrays: dict[str, tuple[str, ...]] = {}
        self._sizes: dict[str, int] = {}  # the variable that holds an input's sizes
        self._handles: dict[str, _Value | None] = {}
        self._values: dict[str, _Value] = {}
        self._returned: dict[int, _Value] = {}
        self.buffers: list[_Buffer] = []
        self.calls: list[tuple[str, list[tuple[str, _Value | str]]]] = []
        self.conditions: list[str] = []  # beside the guards: what lies inside of what

    def read(self, statement: str) -> None:
        for pattern, action in _FORMS:
            found = pattern.fullmatch(statement)
            if found:
                action(self, found)
                return
        raise NotUnderstood(f"statement {statement[:100]}")

    def ignore(self, _: re.Match[str]) -> None:
        pass

    def inputs(self, found: re.Match[str]) -> None:
        self.num_inputs = int(found[1])
        if self.num_inputs != len(self._symbols.inputs):
            raise NotUnderstood("another number of inputs")

    def take_input(self, found: re.Match[str]) -> None:
        index = int(found[2])
        if not 0 <= index < self.num_inputs:
            raise NotUnderstood("an input that there is not")
        self._define(found[1], _Value(index))

    def sizes_of(self, found: re.Match[str]) -> None:
        root = self._value(found[2]).root
        if not isinstance(root, int):
            raise NotUnderstood("the sizes of a buffer")
        self._sizes[found[1]] = root

    def symbol(self, found: re.Match[str]) -> None:
        name, sizes, dimension = found[1], found[2], int(found[3])
        if sizes not in self._sizes:
            raise NotUnderstood(f"sizes {sizes}")
        known = self._symbols.inputs[self._sizes[sizes]]
        names = self._symbols.names
        if name not in names or dimension >= len(known) or known[dimension] not in names:
            raise NotUnderstood(f"symbol {name}")
        if known[dimension] != name:  # one of several that are equal
            self.conditions.append(f"{known[dimension]} == {name}")

    def same_symbol(self, found: re.Match[str]) -> None:
        """One of several that are equal, named after another (torch 2.15)."""
        names = self._symbols.names
        if found[1] not in names or found[2] not in names:
            raise NotUnderstood(f"symbol {found[1]}")
        self.conditions.append(f"{found[2]} == {found[1]}")

    def array(self, found: re.Match[str]) -> None:
        elements = [element for element in split_arguments(found[2]) if element]
        self._arrays[found[1]] = tuple(self._expression(element) for element in elements)

    def empty_array(self, found: re.Match[str]) -> None:
        self._arrays[found[1]] = ()

    def declare_handle(self, found: re.Match[str]) -> None:
        self._handles[found[1]] = None

    def allocate(self, found: re.Match[str]) -> None:
        sizes, strides = self._shape(found[1], found[2], found[3])
        dtype, handle = found[4], found[5]
        if dtype not in ITEM_SIZES:
            raise NotUnderstood(f"dtype {dtype}")
        if handle not in self._handles or self._handles[handle] is not None:
            raise NotUnderstood(f"handle {handle}")
        buffer = _Buffer(dtype, sizes, strides)
        self.buffers.append(buffer)
        self._handles[handle] = _Value(buffer, sizes, strides)

    def wrap_handle(self, found: re.Match[str]) -> None:
        value = self._handles.pop(found[2], None)
        if value is None:
            raise NotUnderstood(f"handle {found[2]}")
        self._define(found[1], value)

    def view(self, found: re.Match[str]) -> None:
        base = self._value(found[2])
        buffer = base.buffer
        sizes, strides = self._shape(found[3], found[4], found[5])
        offset = f"{base.offset} + ({self._expression(found[6])})"
        whole, part = extent(buffer.sizes, buffer.strides), extent(sizes, strides)
        self.conditions.append(f"({offset}) >= 0 && ({offset}) + ({part}) <= ({whole})")
        self._define(found[1], _Value(buffer, sizes, strides, offset))

    def move(self, found: re.Match[str]) -> None:
        self._define(found[1], self._pop(found[2]))

    def reset(self, found: re.Match[str]) -> None:
        self._pop(found[1])

    def call(self, found: re.Match[str]) -> None:
        if found[1] not in self._kernels:
            raise NotUnderstood(f"call of {found[1]}")
        arguments = [self._argument(text) for text in split_arguments(found[2])]
        self.calls.append((found[1], arguments))

    def give_output(self, found: re.Match[str]) -> None:
        index = int(found[1])
        if index in self._returned:
            raise NotUnderstood("an output given twice")
        self._returned[index] = self._pop(found[2])

    def outputs(self) -> list[Output]:
        """What is returned. Each is the whole of a buffer of its own."""
        if not self.calls or self.num_inputs < 0:
            raise NotUnderstood("no call of a kernel")
        count = len(self._returned)
        if sorted(self._returned) != list(range(count)) or not count:
            raise NotUnderstood("the outputs")
        values = [self._returned[index] for index in range(count)]
        if len({id(value.buffer) for value in values}) != count:
            raise NotUnderstood("outputs that share memory")
        for value in values:
            whole = extent(value.buffer.sizes, value.buffer.strides)
            if (value.sizes, value.strides) != (value.buffer.sizes, value.buffer.strides):
                part = extent(value.sizes, value.strides)
                self.conditions.append(f"({value.offset}) == 0 && ({part}) == ({whole})")
        return [Output(value.buffer.dtype, value.sizes, value.strides) for value in values]

    def order(self) -> list[_Buffer]:
        """The buffers as the plan numbers them: what is returned, then scratch."""
        returned = [self._returned[index].buffer for index in range(len(self._returned))]
        own = {id(buffer) for buffer in returned}
        return returned + [buffer for buffer in self.buffers if id(buffer) not in own]

    def _define(self, name: str, value: _Value) -> None:
        if name in self._values:
            raise NotUnderstood(f"{name} is defined twice")
        self._values[name] = value

    def _value(self, name: str) -> _Value:
        if name not in self._values:
            raise NotUnderstood(f"unknown tensor {name}")
        return self._values[name]

    def _pop(self, name: str) -> _Value:
        value = self._value(name)
        del self._values[name]
        return value

    def _shape(
        self, dimensions: str, sizes: str, strides: str
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        count = int(dimensions)
        if count > _MAX_RANK or any(
            name not in self._arrays or len(self._arrays[name]) < count for name in (sizes, strides)
        ):
            raise NotUnderstood("the sizes of a tensor")
        return self._arrays[sizes][:count], self._arrays[strides][:count]

    def _expression(self, text: str) -> str:
        example = dict.fromkeys(self._symbols.names, 7)
        if not _EXPRESSION.fullmatch(text) or not isinstance(evaluate(text, example), int):
            raise NotUnderstood(f"expression {text[:60]}")
        return text

    def _argument(self, text: str) -> tuple[str, _Value | str]:
        found = _POINTER.fullmatch(text)
        if found:
            value = self._value(found[2])
            if isinstance(value.root, int) and not found[1].startswith("const "):
                raise NotUnderstood("a kernel that writes an input")
            return found[1], value
        if _FLOAT.fullmatch(text):
            return "", text
        return "", self._expression(text)


def _assemble(
    reader: _Reader,
    outputs: Sequence[Output],
    definitions: str,
    symbols: Symbols,
    pattern: Mapping[str, Any],
) -> ShapePlan:
    order = reader.order()
    numbers = {id(buffer): reader.num_inputs + index for index, buffer in enumerate(order)}
    calls = "".join(
        f"    {name}({', '.join(_argument_text(t, v, numbers) for t, v in arguments)});\n"
        for name, arguments in reader.calls
    )
    scratch = tuple(
        f"({extent(buffer.sizes, buffer.strides)})*{ITEM_SIZES[buffer.dtype]}"
        for buffer in order[len(outputs) :]
    )
    tensors = [sizes for sizes in (*symbols.inputs, *(o.sizes for o in outputs)) if sizes]
    elements = ["*".join(f"({size})" for size in sizes) for sizes in tensors]
    written = [text for o in outputs for text in (*o.sizes, *o.strides)] + list(scratch)
    lines = [
        f"  if (!({condition})) return 1;" for condition in (*symbols.guards, *reader.conditions)
    ]
    lines += [f"  o[{index}] = {text};" for index, text in enumerate(written)]
    # 31 bits count the elements of every tensor: the key builder lets no others through, but what
    # is computed from them may be larger.
    lines += ["  std::int64_t most = 1;"]
    lines += [f"  most = std::max<std::int64_t>(most, {text});" for text in elements]
    lines += ["  if (most > INT32_MAX) return 1;", f"  o[{len(written)}] = most;"]
    declared = "".join(
        f"  [[maybe_unused]] const std::int64_t {name} = s[{index}];\n"
        for index, name in enumerate(symbols.names)
    )
    body = f"{definitions}\n{declared}{calls}" + "\n".join(lines)
    digest = hashlib.sha256(body.encode()).hexdigest()[:32]
    entry, shape = ENTRY_PREFIX + digest, SHAPE_PREFIX + digest
    source = _SOURCE.format(
        digest=digest,
        definitions=definitions,
        entry=entry,
        shape=shape,
        declared=declared,
        checked="\n".join(lines),
        calls=calls,
    )
    return ShapePlan(
        entry=entry,
        shape=shape,
        num_inputs=reader.num_inputs,
        outputs=tuple(outputs),
        scratch=scratch,
        guards=symbols.guards,
        pattern=pattern,
        symbols=symbols.names,
        source=source,
    )


_SOURCE = """\
namespace eagercache_{digest} {{
{definitions}
}}
extern "C" __attribute__((visibility("default"))) std::int32_t {shape}(
    const std::int64_t* s, std::int64_t* o) noexcept {{
{declared}{checked}
  return 0;
}}
extern "C" __attribute__((visibility("default"))) std::int32_t {entry}(
    void* const* p, const std::int64_t* s) noexcept {{
  using namespace eagercache_{digest};
{declared}  try {{
{calls}    return 0;
  }} catch (...) {{
    return 1;
  }}
}}
"""


def _argument_text(type_: str, value: _Value | str, numbers: Mapping[int, int]) -> str:
    if isinstance(value, str):
        return value
    number = value.root if isinstance(value.root, int) else numbers[id(value.root)]
    offset = f" + ({value.offset})" if value.offset != "0L" else ""
    return f"({type_})(p[{number}]){offset}"


_TYPE = r"(?:const )?[\w:]+(?:<[\w:]+>)?"
_POINTER = re.compile(rf"\(({_TYPE}\*)\)\((\w+)\.data_ptr\(\)\)")
_FLOAT = re.compile(r"static_cast<(?:float|double)>\(-?[\d.e+-]+f?\)")

# The forms of a statement. A statement must match one of them whole.
_FORMS: tuple[tuple[re.Pattern[str], Callable[[_Reader, re.Match[str]], None]], ...] = tuple(
    (re.compile(pattern), action)
    for pattern, action in (
        (r"__check_inputs_outputs\(input_handles, output_handles\)", _Reader.ignore),
        (
            r"auto inputs = steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\)",
            _Reader.inputs,
        ),
        (r"auto (\w+) = std::move\(inputs\[(\d+)\]\)", _Reader.take_input),
        (r"auto (\w+) = (\w+)\.sizes\(\)", _Reader.sizes_of),
        (r"int64_t (\w+) = (\w+)\[(\d+)\]", _Reader.symbol),
        (r"int64_t (\w+) = (\w+)", _Reader.same_symbol),
        (r"inputs\.clear\(\)", _Reader.ignore),
        (
            r"\[\[maybe_unused\]\] auto& kernels = "
            r"static_cast<AOTInductorModelKernels&>\(\*this->kernels_\.get\(\)\)",
            _Reader.ignore,
        ),
        (r"(?:static constexpr|const) int64_t (\w+)\[\] = \{([^{}]+)\}", _Reader.array),
        (r"(?:static constexpr|const) int64_t \*(\w+)=nullptr", _Reader.empty_array),
        (r"AtenTensorHandle (\w+)", _Reader.declare_handle),
        (
            r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_empty_strided\((\d+), (\w+), (\w+), "
            r"cached_torch_dtype_(\w+), cached_torch_device_type_cpu, this->device_idx_, "
            r"&(\w+)\)\)",
            _Reader.allocate,
        ),
        (r"RAIIAtenTensorHandle (\w+)\((\w+)\)", _Reader.wrap_handle),
        (
            r"auto (\w+) = wrap_with_raii_handle_if_needed\(reinterpret_tensor_wrapper\("
            r"(\w+), (\d+), (\w+), (\w+), ([^;]+)\)\)",
            _Reader.view,
        ),
        (r"auto (\w+) = std::move\((\w+)\)", _Reader.move),
        (r"(\w+)\.reset\(\)", _Reader.reset),
        (r"output_handles\[(\d+)\] = (\w+)\.release\(\)", _Reader.give_output),
        (r"(\w+)\((.*)\)", _Reader.call),
    )
)
