"""The launch plan of a CUDA kernel, and the machine code that it launches.

Made of Inductor's wrapper text and of the Triton kernels that the loaded module holds. The plan
numbers pointers: first the inputs in argument order, then the outputs, then the scratch buffers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagercache.worker.cuda.sizes import Expression
from eagercache.worker.cuda.wrapper import (
    Argument,
    Call,
    FinalReduction,
    Number,
    Scalar,
    Value,
    WrapperText,
    fixed,
)
from eagercache.worker.inductor.launch_plan import Output, adopt_strides
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.inductor.wrapper_text import ITEM_SIZES

VERSION = 1
SCALAR_VERSION = 1
# CudaPlan's limits in dispatcher/plans/cuda_plan.h: arguments of a launch, and launches or buffers.
MAX_ARGUMENTS = 512
MAX_NUMBER = 1024
# Of a manifest (kernel_cache/FORMAT.md): objects, and what of its 64 KiB a plan may take.
MAX_OBJECTS = 64
MAX_TEXT = 56_000

# Triton's names for what a kernel takes by value.
_TYPES = {
    "i1": "int32",
    "i8": "int32",
    "i16": "int32",
    "i32": "int32",
    "u32": "int32",
    "i64": "int64",
    "u64": "int64",
    "fp16": "float32",
    "bf16": "float32",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
}


# Inductor's names for the parameters that a kernel stores through.
_WRITTEN = ("out_ptr", "in_out_ptr")


@dataclass(frozen=True)
class Launch:
    """One kernel: which cubin, its function, and the arguments as the plan stores them."""

    cubin: bytes = field(repr=False)
    function: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[tuple[Any, ...], ...]


def distinct(cubins: Iterable[bytes]) -> list[bytes]:
    """Each once, in their order."""
    return list({hashlib.sha256(cubin).digest(): cubin for cubin in cubins}.values())


@dataclass(frozen=True)
class CudaPlan:
    """How to launch the kernels of one call."""

    num_inputs: int
    writes: tuple[int, ...]  # inputs that are written, ascending
    outputs: tuple[Output, ...]
    scratch: tuple[int, ...]  # bytes of each buffer
    launches: tuple[Launch, ...]
    scalars: int = 0  # numbers of the call that the kernels take

    def with_strides(self, strides: Sequence[Sequence[int]]) -> CudaPlan:
        """The plan with ``strides``, native's, where they differ in dimensions of size 1 only."""
        return replace(self, outputs=adopt_strides(self.outputs, strides))

    def cubins(self) -> list[bytes]:
        """Each once, in the order that the plan's text numbers them."""
        return distinct(launch.cubin for launch in self.launches)

    def to_json(self) -> str:
        """The canonical text that the manifest stores and the hook reads; without the cubins."""
        cubins = self.cubins()
        rows: dict[str, Any] = {
            "version": VERSION,
            "inputs": self.num_inputs,
            "outputs": [output.as_dict() for output in self.outputs],
            "scratch": list(self.scratch),
            "writes": list(self.writes),
            "launches": [
                {
                    "object": cubins.index(launch.cubin),
                    "function": launch.function,
                    "grid": list(launch.grid),
                    "threads": launch.threads,
                    "shared": launch.shared,
                    "arguments": [list(argument) for argument in launch.arguments],
                }
                for launch in self.launches
            ],
        }
        if self.scalars:
            rows = {"version": SCALAR_VERSION, "plan": rows, "scalars": self.scalars}
        return json.dumps(rows, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class TritonKernel:
    """A compiled Triton kernel with the configuration that it was tuned to.

    ``signature`` gives Triton's type of every parameter that machine code takes, in order;
    ``names`` the parameters that a launch passes by position, constants among them.
    """

    cubin: bytes = field(repr=False)
    function: str
    threads: int
    shared: int
    names: tuple[str, ...]
    signature: Mapping[str, str]
    scratch_pointers: int  # null pointers at the end
    grid: Mapping[str, Any]  # what `grid_of` needs

    def grid_of(self, numbers: Mapping[str, int]) -> tuple[int, int, int]:
        """Blocks in each dimension, for the launch's integer arguments."""
        from eagercache.worker.compat import triton_kernels

        return triton_kernels.triton_grid(self.grid, numbers)

    def grid_texts(self) -> tuple[list[str], tuple[str, str, str], Mapping[str, int]]:
        """The same as Python's text, of the arguments' names; see `triton_grid_texts`."""
        from eagercache.worker.compat import triton_kernels

        return triton_kernels.triton_grid_texts(self.grid)


def launched(
    call: Call, kernels: Mapping[str, TritonKernel]
) -> tuple[TritonKernel, dict[str, Argument]]:
    """The kernel of a launch, and what it is given by its parameters' names."""
    kernel = kernels.get(call.kernel)
    if kernel is None or len(call.arguments) != len(kernel.names):
        raise NotUnderstood(f"the launch of {call.kernel}")
    return kernel, dict(zip(kernel.names, call.arguments, strict=True))


def make_plan(text: WrapperText, kernels: Mapping[str, TritonKernel], scalars: int = 0) -> CudaPlan:
    """The plan of a wrapper whose kernels are ``kernels``. Raises NotUnderstood.

    They take ``scalars`` numbers of the call.
    """
    outputs = [value.buffer for value in text.outputs]
    scratch = text.scratch()
    numbers = {
        id(buffer): text.num_inputs + index for index, buffer in enumerate([*outputs, *scratch])
    }
    launches = []
    written: set[int] = set()
    for call in text.calls:
        if isinstance(call, FinalReduction):
            raise NotUnderstood("a reduction that an eager operator ends")
        kernel, passed = launched(call, kernels)
        grid = kernel.grid_of({n: v for n, v in passed.items() if isinstance(v, int)})
        written |= {
            value.root
            for name, value in passed.items()
            if name.startswith(_WRITTEN)
            and isinstance(value, Value)
            and isinstance(value.root, int)
        }
        arguments = [
            argument_of(kind, passed[name], numbers) for name, kind in kernel.signature.items()
        ]
        arguments += [("null",)] * kernel.scratch_pointers
        launches.append(
            Launch(
                kernel.cubin,
                kernel.function,
                grid,
                kernel.threads,
                kernel.shared,
                tuple(arguments),
            )
        )
    if any(len(launch.arguments) > MAX_ARGUMENTS for launch in launches):
        raise NotUnderstood("a kernel of very many arguments")
    if max(len(launches), len(outputs), len(scratch)) > MAX_NUMBER:
        raise NotUnderstood("very many kernels or buffers")
    if not text.outputs and not written:
        raise NotUnderstood("nothing is returned or written")
    plan = CudaPlan(
        num_inputs=text.num_inputs,
        writes=tuple(sorted(written)),
        outputs=text.output_specs(),
        scratch=tuple(fixed(buffer.bytes) for buffer in scratch),
        launches=tuple(launches),
        scalars=scalars,
    )
    if len(plan.cubins()) > MAX_OBJECTS or len(plan.to_json()) > MAX_TEXT:
        raise NotUnderstood("very many kernels or buffers")
    return plan


def argument_of(kind: str, value: Argument, pointers: Mapping[int, int]) -> tuple[Any, ...]:
    """What a launch passes where machine code takes a ``kind``, as the plan stores it.

    ``pointers`` numbers buffers by their identity. An open size stands in the place of the number
    that a plan has it by. Raises NotUnderstood.
    """
    if kind.startswith("*"):
        if not isinstance(value, Value):
            raise NotUnderstood("a number where the kernel takes a tensor")
        if isinstance(value.root, int):
            return ("pointer", value.root, 0)
        offset = value.offset * ITEM_SIZES[value.root.dtype]
        moved = "part" if isinstance(offset, Expression) else "pointer"
        return (moved, pointers[id(value.root)], offset)
    if kind not in _TYPES:
        raise NotUnderstood(f"an argument of type {kind}")
    type_name = _TYPES[kind]
    if isinstance(value, Expression):
        if not type_name.startswith("int"):
            raise NotUnderstood("an open size where the kernel takes no integer")
        return ("number", value, type_name)
    if isinstance(value, Number):
        return ("input", value.index, type_name)
    if isinstance(value, Scalar):
        if type_name.startswith("int"):
            raise NotUnderstood("a number of the call where the kernel takes an integer")
        return (value.kind, value.index, type_name)
    if isinstance(value, Value):
        raise NotUnderstood("a tensor where the kernel takes a number")
    return ("value", type_name, _bits(type_name, value))


def _bits(type_name: str, value: float) -> int:
    """The number's bits, as a signed 64-bit integer."""
    if type_name == "float32":
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    if type_name == "float64":
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)
