"""AOTInductor's wrapper, read statement by statement: what it does around the generated kernels.

What `run_impl` allocates, views, calls and returns is kept by `Reader`; a statement that is not one
of the few forms below raises `NotUnderstood`. Reads the text of every torch that was tried. The
numbers of the text are integers where sizes are fixed (`launch_plan`) and C++ expressions where
they are symbolic (`shape_plan`).
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from eagercache.worker.inductor.wrapper_statements import NotUnderstood, split_arguments

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


N = TypeVar("N")


@dataclass(frozen=True, eq=False)
class Buffer(Generic[N]):
    """Memory that the wrapper allocates; sizes and strides in elements."""

    dtype: str
    sizes: tuple[N, ...]
    strides: tuple[N, ...]


@dataclass(frozen=True)
class Value(Generic[N]):
    """A tensor variable of the wrapper: an input, by its index, or (part of) a buffer."""

    root: int | Buffer[N]
    sizes: tuple[N, ...] = ()
    strides: tuple[N, ...] = ()
    offsets: tuple[N, ...] = ()  # elements, to be added up

    @property
    def buffer(self) -> Buffer[N]:
        """Raises NotUnderstood for an input."""
        if isinstance(self.root, int):
            raise NotUnderstood("an input is viewed or returned")
        return self.root


@dataclass(frozen=True)
class Argument(Generic[N]):
    """What a kernel is given: a tensor's data as a pointer of that type, or a literal's text."""

    type: str
    value: Value[N] | str


# Of a definition in a namespace of its own: what is before its parameters, its name, and those.
_PARAMETERS = re.compile(r"^(static void (\w+)\()([^()]*)\)", re.MULTILINE)

_TYPE = r"(?:const )?[\w:]+(?:<[\w:]+>)?"
_POINTER = re.compile(rf"\(({_TYPE}\*)\)\((\w+)\.data_ptr\(\)\)")


def forms(rows: Iterable[tuple[str, str]]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Forms of statements: what matches one whole goes to the reader's method of that name."""
    return tuple((re.compile(pattern), method) for pattern, method in rows)


class Reader(abc.ABC, Generic[N]):
    """State of the walk over run_impl's statements. All methods raise NotUnderstood."""

    # A statement must match one of them whole.
    FORMS: ClassVar = forms((
        (r"__check_inputs_outputs\(input_handles, output_handles\)", "ignore"),
        (
            r"auto inputs = steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\)",
            "inputs",
        ),
        (r"auto (\w+) = std::move\(inputs\[(\d+)\]\)", "take_input"),
        (r"inputs\.clear\(\)", "ignore"),
        (
            r"\[\[maybe_unused\]\] auto& kernels = "
            r"static_cast<AOTInductorModelKernels&>\(\*this->kernels_\.get\(\)\)",
            "ignore",
        ),
        (r"(?:static constexpr|const) int64_t (\w+)\[\] = \{([^{}]*)\}", "array"),
        (r"(?:static constexpr|const) int64_t \*(\w+)=nullptr", "empty_array"),
        (r"AtenTensorHandle (\w+)", "declare_handle"),
        (
            r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_empty_strided\((\d+), (\w+), (\w+), "
            r"cached_torch_dtype_(\w+), cached_torch_device_type_cpu, this->device_idx_, "
            r"&(\w+)\)\)",
            "allocate",
        ),
        (r"RAIIAtenTensorHandle (\w+)\((\w+)\)", "wrap_handle"),
        (
            r"auto (\w+) = wrap_with_raii_handle_if_needed\(reinterpret_tensor_wrapper\("
            r"(\w+), (\d+), (\w+), (\w+), ([^;]+)\)\)",
            "view",
        ),
        (r"auto (\w+) = std::move\((\w+)\)", "move"),
        (r"(\w+)\.reset\(\)", "reset"),
        (r"output_handles\[(\d+)\] = (\w+)\.release\(\)", "give_output"),
        (r"(\w+)\((.*)\)", "call"),
    ))  # fmt: skip

    def __init__(self, kernels: Iterable[str]) -> None:
        self._kernels = frozenset(kernels)
        self.num_inputs = -1
        self._arrays: dict[str, tuple[N, ...]] = {}
        self._handles: dict[str, Value[N] | None] = {}
        self._values: dict[str, Value[N]] = {}
        self._returned: dict[int, Value[N]] = {}
        self.buffers: list[Buffer[N]] = []
        self._calls: list[tuple[str, list[Argument[N]]]] = []

    @abc.abstractmethod
    def number(self, text: str) -> N:
        """A size, stride or offset."""

    @abc.abstractmethod
    def literal(self, text: str) -> str:
        """An argument that is no tensor, as it is written in the call."""

    @abc.abstractmethod
    def check_view(self, value: Value[N]) -> None:
        """Refuses part of a buffer that leaves it."""

    @abc.abstractmethod
    def note_written(self, index: int) -> None:
        """A kernel takes an input as a pointer to non-const."""

    @abc.abstractmethod
    def offset_text(self, value: Value[N]) -> str:
        """What is added to the pointer to a value's buffer."""

    def read(self, statement: str) -> None:
        """The next statement."""
        for pattern, method in self.FORMS:
            found = pattern.fullmatch(statement)
            if found:
                getattr(self, method)(found)
                return
        raise NotUnderstood(f"statement {statement[:100]}")

    def ignore(self, _: re.Match[str]) -> None:
        """A statement that does nothing for a plan."""

    def inputs(self, found: re.Match[str]) -> None:
        """How many inputs there are."""
        self.num_inputs = int(found[1])

    def take_input(self, found: re.Match[str]) -> None:
        """A variable for an input."""
        index = int(found[2])
        if not 0 <= index < self.num_inputs:
            raise NotUnderstood("an input that there is not")
        self._define(found[1], Value(index))

    def array(self, found: re.Match[str]) -> None:
        """Sizes or strides."""
        elements = [element for element in split_arguments(found[2]) if element]
        self._arrays[found[1]] = tuple(self.number(element) for element in elements)

    def empty_array(self, found: re.Match[str]) -> None:
        """Sizes or strides of a tensor without dimensions."""
        self._arrays[found[1]] = ()

    def declare_handle(self, found: re.Match[str]) -> None:
        """A variable that an allocation will fill."""
        self._handles[found[1]] = None

    def allocate(self, found: re.Match[str]) -> None:
        """A buffer."""
        sizes, strides = self._shape(found[1], found[2], found[3])
        dtype, handle = found[4], found[5]
        if dtype not in ITEM_SIZES:
            raise NotUnderstood(f"dtype {dtype}")
        if handle not in self._handles or self._handles[handle] is not None:
            raise NotUnderstood(f"handle {handle}")
        buffer = Buffer(dtype, sizes, strides)
        self.buffers.append(buffer)
        self._handles[handle] = Value(buffer, sizes, strides)

    def wrap_handle(self, found: re.Match[str]) -> None:
        """A tensor variable for a buffer."""
        value = self._handles.pop(found[2], None)
        if value is None:
            raise NotUnderstood(f"handle {found[2]}")
        self._define(found[1], value)

    def view(self, found: re.Match[str]) -> None:
        """A tensor variable for part of a buffer."""
        base = self.value(found[2])
        sizes, strides = self._shape(found[3], found[4], found[5])
        offsets = (*base.offsets, self.number(found[6]))
        value = Value(base.buffer, sizes, strides, offsets)
        self.check_view(value)
        self._define(found[1], value)

    def move(self, found: re.Match[str]) -> None:
        """Another name."""
        self._define(found[1], self._pop(found[2]))

    def reset(self, found: re.Match[str]) -> None:
        """A name that is not used any more."""
        self._pop(found[1])

    def call(self, found: re.Match[str]) -> None:
        """A call of a kernel."""
        if found[1] not in self._kernels:
            raise NotUnderstood(f"call of {found[1]}")
        arguments = [self._argument(text) for text in split_arguments(found[2])]
        self._calls.append((found[1], arguments))

    def give_output(self, found: re.Match[str]) -> None:
        """A tensor that is returned."""
        index = int(found[1])
        if index in self._returned:
            raise NotUnderstood("an output given twice")
        self._returned[index] = self._pop(found[2])

    def value(self, name: str) -> Value[N]:
        """The tensor of that name."""
        if name not in self._values:
            raise NotUnderstood(f"unknown tensor {name}")
        return self._values[name]

    def returned(self) -> list[Value[N]]:
        """What is returned, at the end of the text. Each is in a buffer of its own."""
        if not self._calls or self.num_inputs < 0:
            raise NotUnderstood("no call of a kernel")
        count = len(self._returned)
        if sorted(self._returned) != list(range(count)):
            raise NotUnderstood("the outputs")
        values = [self._returned[index] for index in range(count)]
        if len({id(value.buffer) for value in values}) != count:
            raise NotUnderstood("outputs that share memory")
        return values

    def scratch(self) -> list[Buffer[N]]:
        """The buffers that are not returned."""
        own = {id(value.buffer) for value in self._returned.values()}
        return [buffer for buffer in self.buffers if id(buffer) not in own]

    def calls_text(self, first: str = "") -> str:
        """The calls of the kernels on a plan's pointers ``p``: inputs, outputs, scratch."""
        order = [*(value.buffer for value in self.returned()), *self.scratch()]
        numbers = {id(buffer): self.num_inputs + index for index, buffer in enumerate(order)}

        def text(argument: Argument[N]) -> str:
            value = argument.value
            if isinstance(value, str):
                return value
            number = value.root if isinstance(value.root, int) else numbers[id(value.root)]
            return f"({argument.type})(p[{number}]){self.offset_text(value)}"

        return "".join(
            f"    {name}({first}{', '.join(map(text, arguments))});\n"
            for name, arguments in self._calls
        )

    def with_distinct_pointers(self, definitions: str) -> str:
        """The kernels' ``definitions``, which say what pointers have their memory to themselves.

        Those are parameters whose arguments, in all calls, are the only ones in their buffer; then
        the compiler keeps in registers what it had to load again behind every store, and calls a
        row's logarithm once a row. Such kernels are not inlined: GCC forgets it where they are.
        """
        alone: dict[str, set[int]] = {}
        for name, arguments in self._calls:
            roots = [
                argument.value.root for argument in arguments if isinstance(argument.value, Value)
            ]
            here = {
                place
                for place, argument in enumerate(arguments)
                if isinstance(argument.value, Value) and roots.count(argument.value.root) == 1
            }
            alone[name] = alone.get(name, here) & here

        def declare(found: re.Match[str]) -> str:
            places = alone.get(found[2], set())
            parameters = [
                text.replace("*", "* __restrict__", 1) if place in places else text
                for place, text in enumerate(found[3].split(","))
            ]
            apart = "[[gnu::noinline]]\n" if "* __restrict__" in "".join(parameters) else ""
            return f"{apart}{found[1]}{','.join(parameters)})"

        return _PARAMETERS.sub(declare, definitions)

    def _define(self, name: str, value: Value[N]) -> None:
        if name in self._values:
            raise NotUnderstood(f"{name} is defined twice")
        self._values[name] = value

    def _pop(self, name: str) -> Value[N]:
        value = self.value(name)
        del self._values[name]
        return value

    def _shape(
        self, dimensions: str, sizes: str, strides: str
    ) -> tuple[tuple[N, ...], tuple[N, ...]]:
        count = int(dimensions)
        if count > _MAX_DIMENSIONS or any(
            name not in self._arrays or len(self._arrays[name]) < count for name in (sizes, strides)
        ):
            raise NotUnderstood("the sizes of a tensor")
        return self._arrays[sizes][:count], self._arrays[strides][:count]

    def _argument(self, text: str) -> Argument[N]:
        found = _POINTER.fullmatch(text)
        if not found:
            return Argument("", self.literal(text))
        value = self.value(found[2])
        if isinstance(value.root, int) and not found[1].startswith("const "):
            self.note_written(value.root)
        return Argument(found[1], value)
