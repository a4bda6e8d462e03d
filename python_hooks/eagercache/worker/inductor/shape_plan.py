"""The plan of a kernel with symbolic sizes, read out of AOTInductor's wrapper.

`wrapper_text` reads it, as it does for `launch_plan`; here sizes, strides and arguments are C++
expressions over the call's symbolic sizes. They are not evaluated here: they go, as text,
into a second function beside the kernels, which checks the guards and gives the hook the numbers
that it allocates by. The same text is evaluated in Python only to compare it with native's answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagercache.worker.inductor.launch_plan import InputCheck, checked_source
from eagercache.worker.inductor.size_expressions import EXPRESSION, evaluate
from eagercache.worker.inductor.wrapper_statements import (
    NotUnderstood,
    kernel_names,
    namespace_body,
    statements,
)
from eagercache.worker.inductor.wrapper_text import ITEM_SIZES, Reader, Value, forms

VERSION = 1
ENTRY_PREFIX = "eagercache_kernel_"
SHAPE_PREFIX = "eagercache_shape_"


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
        entry, shape: the functions' names; dispatcher/plans/shape_plan.h says what they do.
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

    def with_checks(self, checks: Sequence[InputCheck]) -> ShapePlan:
        """The plan whose kernel's function returns 2 where an input does not pass."""
        if not checks:
            return self
        digest, source = checked_source(self.source, self.entry, checks)
        entry, shape = ENTRY_PREFIX + digest, SHAPE_PREFIX + digest
        return replace(self, entry=entry, shape=shape, source=source)

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
    *,
    distinct: bool = False,
) -> ShapePlan:
    """The plan of two generated texts. Raises NotUnderstood.

    ``native`` says for a few values of the symbols which strides native's outputs have: where they
    differ from the text's in dimensions of size 1, which address nothing, native's are taken.
    ``distinct``: the compiler is told of what pointers the memory is no other one's.
    """
    reader = _Reader(kernel_names(kernel), symbols)
    for statement in statements(wrapper):
        reader.read(statement)
    outputs = [
        _adopt(output, index, symbols.names, native)
        for index, output in enumerate(reader.outputs())
    ]
    definitions = namespace_body(kernel)
    if distinct:
        definitions = reader.with_distinct_pointers(definitions)
    return _assemble(reader, outputs, definitions, symbols, pattern)


def _adopt(
    output: Output,
    index: int,
    names: Sequence[str],
    native: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
) -> Output:
    """``output`` with the strides of its dimensions of size 1 as native has them.

    Such a stride is how many elements lie inside of the dimension, in native's order of them.
    """
    strides = list(output.strides)
    for dimension, size in enumerate(output.sizes):
        if evaluate(size, {}) != 1:
            continue
        following = (
            f"({output.sizes[dimension + 1]})*({strides_of(output)[dimension + 1]})"
            if dimension + 1 < len(output.sizes)
            else "1L"
        )
        around = [
            f"({size})*({stride})"
            for other, (size, stride) in enumerate(zip(output.sizes, output.strides, strict=True))
            if other != dimension
        ]
        for candidate in (strides[dimension], following, "1L", *around):
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


_FLOAT = re.compile(r"static_cast<(?:float|double)>\(-?[\d.e+-]+f?\)")


class _Reader(Reader[str]):
    FORMS = (
        *forms((
            (r"auto (\w+) = (\w+)\.sizes\(\)", "sizes_of"),
            (r"int64_t (\w+) = (\w+)\[(\d+)\]", "symbol"),
            (r"int64_t (\w+) = (\w+)", "same_symbol"),
        )),
        *Reader.FORMS,
    )  # fmt: skip

    def __init__(self, kernels: Sequence[str], symbols: Symbols) -> None:
        super().__init__(kernels)
        self._symbols = symbols
        self._sizes: dict[str, int] = {}  # the variable that holds an input's sizes
        self.conditions: list[str] = []  # beside the guards: what lies inside of what

    def number(self, text: str) -> str:
        example = dict.fromkeys(self._symbols.names, 7)
        if not EXPRESSION.fullmatch(text) or not isinstance(evaluate(text, example), int):
            raise NotUnderstood(f"expression {text[:60]}")
        return text

    def literal(self, text: str) -> str:
        return text if _FLOAT.fullmatch(text) else self.number(text)

    def inputs(self, found: re.Match[str]) -> None:
        super().inputs(found)
        if self.num_inputs != len(self._symbols.inputs):
            raise NotUnderstood("another number of inputs")

    def sizes_of(self, found: re.Match[str]) -> None:
        root = self.value(found[2]).root
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

    def check_view(self, value: Value[str]) -> None:
        buffer, offset = value.buffer, _offset(value)
        whole, part = extent(buffer.sizes, buffer.strides), extent(value.sizes, value.strides)
        self.conditions.append(f"({offset}) >= 0 && ({offset}) + ({part}) <= ({whole})")

    def note_written(self, index: int) -> None:
        raise NotUnderstood("a kernel that writes an input")

    def offset_text(self, value: Value[str]) -> str:
        return f" + ({_offset(value)})" if value.offsets else ""

    def outputs(self) -> list[Output]:
        """What is returned. Each is the whole of a buffer of its own."""
        values = self.returned()
        if not values:
            raise NotUnderstood("the outputs")
        for value in values:
            whole = extent(value.buffer.sizes, value.buffer.strides)
            if (value.sizes, value.strides) != (value.buffer.sizes, value.buffer.strides):
                part = extent(value.sizes, value.strides)
                self.conditions.append(f"({_offset(value)}) == 0 && ({part}) == ({whole})")
        return [Output(value.buffer.dtype, value.sizes, value.strides) for value in values]


def _offset(value: Value[str]) -> str:
    return "0L" + "".join(f" + ({offset})" for offset in value.offsets)


def _assemble(
    reader: _Reader,
    outputs: Sequence[Output],
    definitions: str,
    symbols: Symbols,
    pattern: Mapping[str, Any],
) -> ShapePlan:
    calls = reader.calls_text()
    scratch = tuple(
        f"({extent(buffer.sizes, buffer.strides)})*{ITEM_SIZES[buffer.dtype]}"
        for buffer in reader.scratch()
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
