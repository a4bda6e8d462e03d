"""The launch plan of a bare kernel: what AOTInductor's wrapper does around the generated kernels.

What the wrapper allocates, views, calls and returns (`wrapper_text` reads it) becomes a plan, which
the hook executes; where it is not understood the call gets a container instead.

A plan numbers pointers: first the inputs in argument order, then the outputs, then the scratch
buffers. Views are resolved here: in the plan they are a pointer and an offset. Inputs that a kernel
takes as a pointer to non-const are written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from eagercache.calls.storage import extent
from eagercache.worker.inductor.wrapper_statements import (
    NotUnderstood,
    kernel_names,
    namespace_body,
    statements,
)
from eagercache.worker.inductor.wrapper_text import ITEM_SIZES, Buffer, Reader, Value

VERSION = 2
SCALAR_VERSION = 1
ENTRY_PREFIX = "eagercache_kernel_"
_STATIC = re.compile(r"^static void (\w+)\(", re.MULTILINE)
SCALARS = "eagercache_scalars"  # the array of numbers in the text of kernels that take some


@dataclass(frozen=True)
class Output:
    """One tensor that the hook allocates and returns."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plans have it."""
        return {"dtype": self.dtype, "sizes": list(self.sizes), "strides": list(self.strides)}


@dataclass(frozen=True)
class IndexRange:
    """What the values of an integer input must be: from ``low`` up to, not including, ``high``.

    Sizes, strides and bounds are numbers, or C++ text in which symbolic sizes stand.
    """

    input: int
    dtype: str  # "int64", as in Output
    sizes: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    low: int | str
    high: int | str

    def text(self) -> str:
        """Statements that return 2 where a value is not."""
        loops = "".join(
            f"  for (std::int64_t i{n} = 0; i{n} < {size}; ++i{n})\n"
            for n, size in enumerate(self.sizes)
        )
        place = " + ".join([f"i{n} * ({s})" for n, s in enumerate(self.strides)] or ["0"])
        return (
            f"{loops}  {{\n"
            f"    const std::int64_t index = "
            f"static_cast<const std::{self.dtype}_t*>(p[{self.input}])[{place}];\n"
            f"    if (index < {self.low} || index >= {self.high}) return 2;\n  }}\n"
        )


class InputCheck(Protocol):
    """What an input must hold for a kernel to answer."""

    def text(self) -> str:
        """C++ statements before the kernels' that return 2 where it does not."""


def checked_source(source: str, entry: str, checks: Sequence[InputCheck]) -> tuple[str, str]:
    """(digest for the names, text) of a kernel's ``source`` that begins with ``checks``."""
    text = "".join(check.text() for check in checks)
    old = entry.removeprefix(ENTRY_PREFIX)
    digest = hashlib.sha256(f"{old}\n{text}".encode()).hexdigest()[:32]
    head, begin, body = source.rpartition("  try {\n")
    return digest, f"{head}{text}{begin}{body}".replace(old, digest)


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

    def with_checks(self, checks: Sequence[InputCheck]) -> LaunchPlan:
        """The plan whose function returns 2, and does nothing, where an input does not pass."""
        if not checks:
            return self
        digest, source = checked_source(self.source, self.entry, checks)
        return replace(self, entry=ENTRY_PREFIX + digest, source=source)

    def to_json(self) -> str:
        """The canonical text that the manifest stores and the hook reads; without the source."""
        plan: dict[str, Any] = {
            "version": VERSION,
            "entry": self.entry,
            "inputs": self.num_inputs,
            "outputs": [output.as_dict() for output in self.outputs],
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


def read_launch_plan(
    wrapper: str, kernel: str, scalars: int = 0, *, distinct: bool = False
) -> LaunchPlan:
    """The plan of two generated texts. Raises NotUnderstood.

    ``scalars``: so many numbers of the call are in the kernel's text as elements of an array.
    ``distinct``: the compiler is told of what pointers the memory is no other one's.
    """
    reader = _Reader(kernel_names(kernel))
    for statement in statements(wrapper):
        reader.read(statement)
    definitions = namespace_body(kernel)
    if distinct:
        definitions = reader.with_distinct_pointers(definitions)
    if scalars:
        definitions = _STATIC.sub(
            rf"static void \1(const double* const __restrict__ {SCALARS}, ", definitions
        )
    return reader.plan(definitions, scalars)


_NUMBER = re.compile(r"(\d+)L?")
_LITERAL = re.compile(r"-?\d+L?|static_cast<(?:int64_t|int32_t|float|double)>\(-?[\d.e+-]+L?f?\)")


class _Reader(Reader[int]):
    def __init__(self, kernels: Sequence[str]) -> None:
        super().__init__(kernels)
        self._written: set[int] = set()

    def number(self, text: str) -> int:
        found = _NUMBER.fullmatch(text)
        if not found:
            raise NotUnderstood(f"number {text[:60]}")
        return int(found[1])

    def literal(self, text: str) -> str:
        if not _LITERAL.fullmatch(text):
            raise NotUnderstood(f"argument {text[:60]}")
        return text

    def allocate(self, found: re.Match[str]) -> None:
        super().allocate(found)
        if _bytes(self.buffers[-1]) == 0:
            raise NotUnderstood("an empty buffer")

    def check_view(self, value: Value[int]) -> None:
        end = sum(value.offsets) + extent(value.sizes, value.strides)
        if end * ITEM_SIZES[value.buffer.dtype] > _bytes(value.buffer):
            raise NotUnderstood("a view that leaves its buffer")

    def note_written(self, index: int) -> None:
        self._written.add(index)

    def offset_text(self, value: Value[int]) -> str:
        offset = sum(value.offsets)
        return f" + {offset}" if offset else ""

    def plan(self, definitions: str, scalars: int) -> LaunchPlan:
        returned = self.returned()
        if not (returned or self._written):
            raise NotUnderstood("the outputs")
        for value in returned:
            whole = extent(value.sizes, value.strides) * ITEM_SIZES[value.buffer.dtype]
            if sum(value.offsets) or whole != _bytes(value.buffer):
                raise NotUnderstood("an output that is part of a buffer")
        calls = self.calls_text("s, " if scalars else "")
        digest = hashlib.sha256(f"{definitions}\n{calls}".encode()).hexdigest()[:32]
        entry = ENTRY_PREFIX + digest
        return LaunchPlan(
            entry=entry,
            num_inputs=self.num_inputs,
            writes=tuple(sorted(self._written)),
            outputs=tuple(Output(v.buffer.dtype, v.sizes, v.strides) for v in returned),
            scratch=tuple(map(_bytes, self.scratch())),
            source=_SOURCE.format(
                digest=digest,
                definitions=definitions,
                entry=entry,
                calls=calls,
                scalars=", const double* s" if scalars else "",
            ),
            scalars=scalars,
        )


def _bytes(buffer: Buffer[int]) -> int:
    return extent(buffer.sizes, buffer.strides) * ITEM_SIZES[buffer.dtype]


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
