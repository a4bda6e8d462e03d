"""The launch plan of a bare kernel: what AOTInductor's wrapper does around the generated kernels.

The wrapper's `run_impl` is read statement by statement. What it allocates, views, calls and returns
becomes a plan, which the hook executes; a statement that is not one of the few forms below raises
`NotUnderstood`, and the call gets a container instead. Known to read the text of torch 2.11 and
2.15.

A plan numbers pointers: first the inputs in argument order, then the outputs, then the scratch
buffers. Views are resolved here: in the plan they are a pointer and an offset. Inputs that a kernel
takes as a pointer to non-const are written.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

VERSION = 2
SCALAR_VERSION = 1
ENTRY_PREFIX = "eagercache_kernel_"
_MAX_DIMENSIONS = 16

ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


class NotUnderstood(ValueError):
    """The generated text has a form that no plan is made of. ``str()`` names it."""


@dataclass(frozen=True)
class Output:
    """One tensor that the hook allocates and returns."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class IndexRange:
    """What the values of an integer input must be: from ``low`` up to, not including, ``high``."""

    input: int
    dtype: str  # "int64", as in Output
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    low: int
    high: int

    def text(self) -> str:
        """Statements that return 2 where a value is not."""
        loops = "".join(
            f"  for (std::int64_t i{n} = 0; i{n} < {size}; ++i{n})\n"
            for n, size in enumerate(self.sizes)
        )
        place = " + ".join([f"i{n} * {s}" for n, s in enumerate(self.strides)] or ["0"])
        return (
            f"{loops}  {{\n"
            f"    const std::int64_t index = "
            f"static_cast<const std::{self.dtype}_t*>(p[{self.input}])[{place}];\n"
            f"    if (index < {self.low} || index >= {self.high}) return 2;\n  }}\n"
        )


@dataclass(frozen=True)
class LaunchPlan:
    """How to launch the kernels of one call, and their source.

    ``source`` holds their definitions in a namespace of its own and one C function, ``entry``,
    that takes the plan's pointers and returns 0, or 1 when a kernel threw. With ``scalars`` it
    takes the address of so many numbers of the call, too.
    """

    entry: str
    num_inputs: int
    writes: tuple[int, ...]  # inputs that are written, ascending
    outputs: tuple[Output, ...]
    scratch: tuple[int, ...]  # bytes of each buffer
    source: str = field(repr=False)
    scalars: int = 0

    def with_strides(self, strides: Sequence[Sequence[int]]) -> LaunchPlan:
        """The plan with ``strides``, native's, where they differ in dimensions of size 1 only."""
        return replace(self, outputs=adopt_strides(self.outputs, strides))

    def with_range_checks(self, ranges: Sequence[IndexRange]) -> LaunchPlan:
        """The plan whose function returns 2, and does nothing, for an index out of its range."""
        if not ranges:
            return self
        checks = "".join(bounds.text() for bounds in ranges)
        old = self.entry.removeprefix(ENTRY_PREFIX)
        digest = hashlib.sha256(f"{old}\n{checks}".encode()).hexdigest()[:32]
        head, begin, body = self.source.rpartition("  try {\n")
        source = f"{head}{checks}{begin}{body}".replace(old, digest)
        return replace(self, entry=ENTRY_PREFIX + digest, source=source)

    def to_json(self) -> str:
        """The canonical text that the manifest stores and the hook reads; without the source."""
        plan: dict[str, Any] = {
            "version": VERSION,
            "entry": self.entry,
            "inputs": self.num_inputs,
            "outputs": [
                {"dtype": o.dtype, "sizes": list(o.sizes), "strides": list(o.strides)}
                for o in self.outputs
            ],
            "scratch": list(self.scratch),
            "writes": list(self.writes),
        }
        if self.scalars:
            plan = {"version": SCALAR_VERSION, "plan": plan, "scalars": self.scalars}
        return json.dumps(plan, sort_keys=True, separators=(",", ":"))


def adopt_strides(
    outputs: tuple[Output, ...], strides: Sequence[Sequence[int]]
) -> tuple[Output, ...]:
    """``outputs`` with ``strides``, native's, where they differ in dimensions of size 1 only."""
    if len(strides) != len(outputs):
        return outputs
    return tuple(
        _adopt(output, tuple(wanted)) for output, wanted in zip(outputs, strides, strict=True)
    )


def _adopt(output: Output, wanted: tuple[int, ...]) -> Output:
    if len(wanted) != len(output.sizes):
        return output
    for size, mine, native in zip(output.sizes, output.strides, wanted, strict=True):
        if mine != native and size != 1:
            return output
    return replace(output, strides=wanted)


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one that a tensor reaches, both included."""
    if math.prod(sizes) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def read_launch_plan(wrapper: str, kernel: str, scalars: int = 0) -> LaunchPlan:
    """The plan of two generated texts. Raises NotUnderstood.

    ``scalars``: so many numbers of the call are in the kernel's text as elements of an array.
    """
    reader = _Reader(frozenset(kernel_names(kernel)))
    for statement in statements(wrapper):
        reader.read(statement)
    definitions = namespace_body(kernel)
    if scalars:
        definitions = _STATIC.sub(
            rf"static void \1(const double* const __restrict__ {SCALARS}, ", definitions
        )
    return reader.plan(definitions, scalars)


def _body(wrapper: str) -> str:
    start = wrapper.rfind("void AOTInductorModel::run_impl(")
    begin = wrapper.find(") {", start)
    end = wrapper.find("} // AOTInductorModel::run_impl", begin)
    if start < 0 or begin < 0 or end < 0:
        raise NotUnderstood("no run_impl")
    return wrapper[begin + len(") {") : end]


# torch 2.15 checks each input here when a variable of the environment asks for it.
_INPUT_CHECK = re.compile(
    r"if \(_check_aoti_runtime_check_inputs_env\(\)\) "
    r"\{ assert_size_stride\(\w+, \{[^{};]*\}, \{[^{};]*\}, \"input\"\); \}"
)


def statements(wrapper: str) -> list[str]:
    """The statements of run_impl, each on one line. Raises NotUnderstood."""
    lines = [
        re.sub(r"\s+// (reuse|alias)$", "", line.rstrip())
        for line in _body(wrapper).splitlines()
        if not _INPUT_CHECK.fullmatch(line.strip())
    ]
    parts = [" ".join(part.split()) for part in "\n".join(lines).split(";")]
    if parts and parts[-1]:
        raise NotUnderstood(f"text after the last statement: {parts[-1][:80]}")
    return parts[:-1]


_DEFINITION = re.compile(r'^extern "C"\s+void\s+(\w+)\(', re.MULTILINE)
_STATIC = re.compile(r"^static void (\w+)\(", re.MULTILINE)
SCALARS = "eagercache_scalars"  # the array of numbers in the text of kernels that take some
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"


def kernel_names(kernel: str) -> list[str]:
    """The functions that the text defines. Raises NotUnderstood."""
    names = _DEFINITION.findall(kernel)
    if not names or len(set(names)) != len(names) or kernel.count('extern "C"') != len(names):
        raise NotUnderstood("the kernels' definitions")
    return names


def namespace_body(kernel: str) -> str:
    """The definitions without their C linkage, so that any number of calls share one file."""
    lines = [line for line in kernel.splitlines() if line.strip() != _INCLUDE]
    for line in lines:
        if line.lstrip().startswith("#") and not line.lstrip().startswith("#pragma "):
            raise NotUnderstood(f"directive {line.strip()[:60]}")
    return _DEFINITION.sub(r"static void \1(", "\n".join(lines)).strip()


@dataclass(frozen=True)
class _Buffer:
    dtype: str
    bytes: int


@dataclass(frozen=True)
class _Value:
    """A tensor variable of the wrapper: an input or (part of) a buffer."""

    root: int | _Buffer  # the input's index, or the very buffer
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0  # elements

    @property
    def buffer(self) -> _Buffer:
        if isinstance(self.root, int):
            raise NotUnderstood("an input is viewed or returned")
        return self.root


@dataclass(frozen=True)
class _Argument:
    type: str
    value: _Value | str  # a tensor's data, or a literal


class _Reader:
    """State of the walk over run_impl's statements."""

    def __init__(self, kernels: frozenset[str]) -> None:
        self._kernels = kernels
        self._num_inputs = -1
        self._arrays: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, _Value | None] = {}
        self._values: dict[str, _Value] = {}
        self._buffers: list[_Buffer] = []
        self._calls: list[tuple[str, list[_Argument]]] = []
        self._outputs: dict[int, _Value] = {}
        self._written: set[int] = set()

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
        self._num_inputs = int(found[1])

    def take_input(self, found: re.Match[str]) -> None:
        index = int(found[2])
        if not 0 <= index < self._num_inputs:
            raise NotUnderstood("an input that there is not")
        self._define(found[1], _Value(index))

    def array(self, found: re.Match[str]) -> None:
        self._arrays[found[1]] = tuple(int(n) for n in re.findall(r"(\d+)L?", found[2]))

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
        size = extent(sizes, strides) * ITEM_SIZES[dtype]
        if size == 0:
            raise NotUnderstood("an empty buffer")
        buffer = _Buffer(dtype, size)
        self._buffers.append(buffer)
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
        offset = base.offset + int(found[6])
        if (offset + extent(sizes, strides)) * ITEM_SIZES[buffer.dtype] > buffer.bytes:
            raise NotUnderstood("a view that leaves its buffer")
        self._define(found[1], _Value(buffer, sizes, strides, offset))

    def move(self, found: re.Match[str]) -> None:
        self._define(found[1], self._values_pop(found[2]))

    def reset(self, found: re.Match[str]) -> None:
        self._values_pop(found[1])

    def call(self, found: re.Match[str]) -> None:
        if found[1] not in self._kernels:
            raise NotUnderstood(f"call of {found[1]}")
        arguments = [self._argument(text) for text in split_arguments(found[2])]
        self._calls.append((found[1], arguments))

    def give_output(self, found: re.Match[str]) -> None:
        index = int(found[1])
        if index in self._outputs:
            raise NotUnderstood("an output given twice")
        self._outputs[index] = self._values_pop(found[2])

    def _define(self, name: str, value: _Value) -> None:
        if name in self._values:
            raise NotUnderstood(f"{name} is defined twice")
        self._values[name] = value

    def _value(self, name: str) -> _Value:
        if name not in self._values:
            raise NotUnderstood(f"unknown tensor {name}")
        return self._values[name]

    def _values_pop(self, name: str) -> _Value:
        value = self._value(name)
        del self._values[name]
        return value

    def _shape(
        self, dimensions: str, sizes: str, strides: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        count = int(dimensions)
        if count > _MAX_DIMENSIONS or any(
            name not in self._arrays or len(self._arrays[name]) < count for name in (sizes, strides)
        ):
            raise NotUnderstood("the sizes of a tensor")
        return self._arrays[sizes][:count], self._arrays[strides][:count]

    def _argument(self, text: str) -> _Argument:
        found = _POINTER.fullmatch(text)
        if found:
            value = self._value(found[2])
            if isinstance(value.root, int) and not found[1].startswith("const "):
                self._written.add(value.root)
            return _Argument(found[1], value)
        if _LITERAL.fullmatch(text):
            return _Argument("", text)
        raise NotUnderstood(f"argument {text[:60]}")

    def plan(self, definitions: str, scalars: int) -> LaunchPlan:
        if not self._calls or self._num_inputs < 0:
            raise NotUnderstood("no call of a kernel")
        if sorted(self._outputs) != list(range(len(self._outputs))) or not (
            self._outputs or self._written
        ):
            raise NotUnderstood("the outputs")
        returned = [self._outputs[index] for index in range(len(self._outputs))]
        roots = [id(value.buffer) for value in returned]
        if len(set(roots)) != len(roots):
            raise NotUnderstood("outputs that share memory")
        for value in returned:
            whole = extent(value.sizes, value.strides) * ITEM_SIZES[value.buffer.dtype]
            if value.offset or whole != value.buffer.bytes:
                raise NotUnderstood("an output that is part of a buffer")
        scratch = [buffer for buffer in self._buffers if id(buffer) not in roots]
        order = roots + [id(buffer) for buffer in scratch]
        numbers = {root: self._num_inputs + index for index, root in enumerate(order)}
        first = "s, " if scalars else ""
        calls = "".join(
            f"    {name}({first}{', '.join(_argument_text(a, numbers) for a in arguments)});\n"
            for name, arguments in self._calls
        )
        digest = hashlib.sha256(f"{definitions}\n{calls}".encode()).hexdigest()[:32]
        entry = ENTRY_PREFIX + digest
        return LaunchPlan(
            entry=entry,
            num_inputs=self._num_inputs,
            writes=tuple(sorted(self._written)),
            outputs=tuple(Output(v.buffer.dtype, v.sizes, v.strides) for v in returned),
            scratch=tuple(buffer.bytes for buffer in scratch),
            source=_SOURCE.format(
                digest=digest,
                definitions=definitions,
                entry=entry,
                calls=calls,
                scalars=", const double* s" if scalars else "",
            ),
            scalars=scalars,
        )


_SOURCE = """\
namespace eagercache_{digest} {{
{definitions}
}}
extern "C" __attribute__((visibility("default"))) std::int32_t {entry}(
    void* const* p{scalars}) noexcept {{
  using namespace eagercache_{digest};
  try {{
{calls}    return 0;
  }} catch (...) {{
    return 1;
  }}
}}
"""


def _argument_text(argument: _Argument, numbers: dict[int, int]) -> str:
    value = argument.value
    if isinstance(value, str):
        return value
    number = value.root if isinstance(value.root, int) else numbers[id(value.root)]
    offset = f" + {value.offset}" if value.offset else ""
    return f"({argument.type})(p[{number}]){offset}"


def split_arguments(text: str) -> list[str]:
    """The arguments of a call, or the elements of a list."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "(<{[":
            depth += 1
        elif character in ")>}]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


_TYPE = r"(?:const )?[\w:]+(?:<[\w:]+>)?"
_POINTER = re.compile(rf"\(({_TYPE}\*)\)\((\w+)\.data_ptr\(\)\)")
_LITERAL = re.compile(r"-?\d+L?|static_cast<(?:int64_t|int32_t|float|double)>\(-?[\d.e+-]+L?f?\)")

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
        (r"inputs\.clear\(\)", _Reader.ignore),
        (
            r"\[\[maybe_unused\]\] auto& kernels = "
            r"static_cast<AOTInductorModelKernels&>\(\*this->kernels_\.get\(\)\)",
            _Reader.ignore,
        ),
        (r"static constexpr int64_t (\w+)\[\] = \{([\dL, ]*)\}", _Reader.array),
        (r"static constexpr int64_t \*(\w+)=nullptr", _Reader.empty_array),
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
            r"(\w+), (\d+), (\w+), (\w+), (\d+)L\)\)",
            _Reader.view,
        ),
        (r"auto (\w+) = std::move\((\w+)\)", _Reader.move),
        (r"(\w+)\.reset\(\)", _Reader.reset),
        (r"output_handles\[(\d+)\] = (\w+)\.release\(\)", _Reader.give_output),
        (r"(\w+)\((.*)\)", _Reader.call),
    )
)
