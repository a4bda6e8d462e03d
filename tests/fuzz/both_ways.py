"""Runs programs with and without kernels in one process, and compares after every call.

Each value is a pair: native's tensor and the other one. A step is done natively, then with kernels
(`_C.set_answering`), from arguments that are equal bit for bit; answers that differ within their
numerics class are made equal again, so that no difference is carried on.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from eagercache import _C
from eagercache.calls.numerics import same_bits

from fuzz.compared import check_kept, described, differs, flat, metadata, outcome
from fuzz.judge import Disagreement, Lockstep, first_difference, flat_of, reach
from fuzz.programs import (
    Data,
    Drawer,
    Gradient,
    Make,
    Op,
    Program,
    Step,
    View,
    make_bank,
    unit_bank,
)
from fuzz.templates import Named, Slot, Spec


@functools.cache
def resolve(path: str) -> Callable[..., Any]:
    """The function that a path from `torch` on names."""
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


@functools.cache
def _bank(dtype: str, values: str) -> torch.Tensor:
    return unit_bank(dtype) if values == "unit" else make_bank(dtype)


def memory_of(spec: Spec, data: Data) -> torch.Tensor:
    """Memory for a fresh tensor, filled."""
    elements = max(spec.place()[2], 1)
    if data.numbers is not None:
        numbers = list(data.numbers[:elements])
        return torch.tensor(numbers, dtype=getattr(torch, spec.dtype))
    return _bank(spec.dtype, spec.values)[data.start : data.start + elements].clone()


class _Memory:
    """One memory on both sides: flat tensors over all of it, and the same as bytes.

    Where native has more behind its answer than elements reach (`mse_loss` has as much as its
    arguments, never written), the kernel may have none of that, and nobody looks at it.
    """

    __slots__ = ("mine", "mine_bytes", "native", "native_bytes", "size", "value")

    def __init__(self, native: torch.Tensor, mine: torch.Tensor, value: int) -> None:
        self.value = value
        self.size = native.untyped_storage().nbytes()
        self.native, self.mine = flat_of(native), flat_of(mine)
        if len(self.mine) < len(self.native):
            self.native = self.native[: len(self.mine)]
        self.native_bytes = self.native.view(torch.uint8)
        self.mine_bytes = self.mine.view(torch.uint8)

    def equal(self) -> bool:
        return torch.equal(self.native_bytes, self.mine_bytes)

    def settle(self) -> None:
        """Makes the other side's bytes native's."""
        self.mine_bytes.copy_(self.native_bytes)


@dataclass
class Totals:
    """What runs of programs did.

    Attributes:
        calls: operator calls and gradients asked for.
        raised: calls that raised, on both sides the same.
        judged: operator calls whose answers differed and are within the numerics class; `how`
            tells of those that the rule of proofs alone did not settle (judge.py).
    """

    programs: int = 0
    calls: int = 0
    raised: int = 0
    judged: int = 0
    gradients: int = 0
    inference: int = 0
    aliased: int = 0
    how: dict[str, int] = field(default_factory=dict)

    def add(self, other: dict[str, Any]) -> None:
        """Adds another process's totals."""
        for name, count in other.items():
            if name == "how":
                _add_counts(self.how, count)
            else:
                setattr(self, name, getattr(self, name) + count)


def _add_counts(sums: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        sums[name] = sums.get(name, 0) + count


class Run:
    """One program as it runs. The `programs.State` of whoever draws it."""

    def __init__(self, mode: str, totals: Totals) -> None:
        self.mode = mode
        self.totals = totals
        self.steps: list[Step] = []
        self.native: list[Any] = []
        self.mine: list[Any] = []
        self._memory_of: list[_Memory | None] = []
        self._leaves: list[int] = []
        # By the address of a memory, on either side.
        self._native_at: dict[int, _Memory] = {}
        self._mine_at: dict[int, _Memory] = {}
        self._by_kind: dict[Any, list[int]] = {}

    # --- what a Drawer asks ---

    def fitting(self, spec: Spec) -> Sequence[int]:
        """See programs.State."""
        strides, offset, _ = spec.place()
        dtype = getattr(torch, spec.dtype)
        aligned = (offset * dtype.itemsize) % 64 == 0
        return self._by_kind.get((dtype, spec.sizes, strides, aligned), ())

    def memories(self, dtype: str, elements: int) -> Sequence[tuple[int, int]]:
        """See programs.State."""
        kind = getattr(torch, dtype)
        return [
            (memory.value, memory.native.numel())
            for memory in self._native_at.values()
            if memory.native.dtype == kind and memory.native.numel() >= elements
        ]

    def with_gradient(self) -> Sequence[int]:
        """See programs.State."""
        leaves = set(self._leaves)
        return [
            i
            for i, value in enumerate(self.native)
            if i not in leaves and isinstance(value, torch.Tensor) and value.requires_grad
        ]

    def leaves(self) -> Sequence[int]:
        """See programs.State."""
        return self._leaves

    def count(self) -> int:
        """See programs.State."""
        return len(self.native)

    def spec_of(self, value: int) -> Spec:
        """See programs.State."""
        tensor = self.native[value]
        return Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.size()))

    # --- steps ---

    def do(self, step: Step) -> None:
        """Does one step on both sides. Raises Disagreement."""
        self.steps.append(step)
        if isinstance(step, Make):
            self._make(step)
        elif isinstance(step, View):
            self._view(step)
        else:
            self._call(step)

    def finish(self) -> None:
        """Compares all memory that the program has touched."""
        for memory in list(self._native_at.values()):
            self._check_memory(memory, "at the end of the program")

    def _make(self, step: Make) -> None:
        strides, offset, _ = step.spec.place()
        outside = self.mode == "inference" and not step.inference
        with torch.inference_mode(False) if outside else contextlib.nullcontext():
            pair = []
            memory = memory_of(step.spec, step.data)
            for side in (memory, memory.clone()):
                tensor = side.as_strided(step.spec.sizes, strides, offset)
                pair.append(tensor.requires_grad_() if step.leaf else tensor)
        if step.leaf:
            self._leaves.append(len(self.native))
        self._add(pair[0], pair[1])

    def _view(self, step: View) -> None:
        strides, _, _ = step.spec.place()
        self._add(
            *(
                side[step.of].as_strided(step.spec.sizes, strides, step.offset)
                for side in (self.native, self.mine)
            )
        )

    def _call(self, step: Op | Gradient) -> None:
        self.totals.calls += 1
        calls = [self._bind(step, side) for side in (self.native, self.mine)]
        expected, error = outcome(calls[0])
        _C.set_answering(True)
        try:
            actual, other_error = outcome(calls[1])
        finally:
            _C.set_answering(False)
        where = _name(step)
        if error is not None or other_error is not None:
            self.totals.raised += 1
            if described(error) != described(other_error):
                raise Disagreement(
                    "error", f"{where}: {described(other_error)}, native {described(error)}"
                )
            actual = expected = None
        self._compare_arguments(step, where)
        self._compare_answers(step, expected, actual, calls[1], where)

    def _bind(self, step: Op | Gradient, values: Sequence[Any]) -> Callable[[], Any]:
        if isinstance(step, Gradient):
            leaves = [values[leaf] for leaf in step.leaves]
            self.totals.gradients += values is self.native
            return lambda: torch.autograd.grad(
                [values[step.of]], leaves, [values[step.seed]], retain_graph=True, allow_unused=True
            )
        template, places = step.template, step.values
        function = resolve(template.function)
        args = [_put(argument, places, values) for argument in template.arguments]
        if not template.keywords:
            return lambda: function(*args)
        kwargs = {name: _put(value, places, values) for name, value in template.keywords}
        return lambda: function(*args, **kwargs)

    # --- comparisons ---

    def _compare_arguments(self, step: Op | Gradient, where: str) -> None:
        used = step.values if isinstance(step, Op) else (step.of, step.seed, *step.leaves)
        for value in used:
            native, mine = self.native[value], self.mine[value]
            if native is None or mine is None:
                continue
            if metadata(native) != metadata(mine):
                raise Disagreement(
                    "metadata", f"{where}: argument v{value} {differs(native, mine)}"
                )
            memory = self._memory_of[value]
            if memory is None:
                continue
            if memory.native.untyped_storage().nbytes() != memory.size:
                memory = self._resized(value)
            if not memory.equal():
                self._check_memory(memory, f"{where}: the memory of v{value}")

    def _resized(self, value: int) -> _Memory:
        """An `out=` tensor got more memory."""
        memory = _Memory(self.native[value], self.mine[value], value)
        self._native_at[memory.native.data_ptr()] = memory
        self._mine_at[memory.mine.data_ptr()] = memory
        self._memory_of[value] = memory
        return memory

    def _check_memory(self, memory: _Memory, where: str) -> None:
        if memory.equal():
            return
        if not same_bits(memory.native, memory.mine):
            raise Disagreement("memory", f"{where}: {first_difference(memory.native, memory.mine)}")
        memory.settle()  # NaN of other bits

    def _compare_answers(
        self, step: Op | Gradient, expected: Any, actual: Any, call: Callable[[], Any], where: str
    ) -> None:
        natives, mine = flat(expected), flat(actual)
        if len(natives) != len(mine):
            raise Disagreement("metadata", f"{where}: {len(mine)} outputs, native {len(natives)}")
        differing: list[tuple[int, _Memory]] = []
        for index, (native, other) in enumerate(zip(natives, mine, strict=True)):
            if not isinstance(native, torch.Tensor) or not isinstance(other, torch.Tensor):
                if type(native) is not type(other) or native != other:
                    raise Disagreement(
                        "values", f"{where}: output {index} {other}, native {native}"
                    )
                self._add_plain(native, other)
                continue
            if metadata(native) != metadata(other):
                raise Disagreement("metadata", f"{where}: output {index} {differs(native, other)}")
            if torch._is_zerotensor(native) or torch._is_zerotensor(other):
                if torch._is_zerotensor(native) is not torch._is_zerotensor(other):
                    raise Disagreement(
                        "metadata", f"{where}: output {index} has no memory on one side"
                    )
                self._add_plain(native, other)
                continue
            self._check_identity(step, native, other, f"{where}: output {index}")
            memory = self._add(native, other, f"{where}: output {index}")
            if memory is not None and not memory.equal() and not same_bits(native, other):
                differing.append((index, memory))
            elif memory is not None and not memory.equal():
                memory.settle()
        if differing:
            self._judge(step, natives, mine, call, where)
            for _, memory in differing:
                memory.settle()

    def _check_identity(self, step: Op | Gradient, native: Any, mine: Any, where: str) -> None:
        if isinstance(step, Gradient):
            return
        expected = [v for v in step.values if self.native[v] is native]
        actual = [v for v in step.values if self.mine[v] is mine]
        if expected != actual:
            raise Disagreement("alias", f"{where} is argument {actual}, native's {expected}")

    def _judge(
        self, step: Op | Gradient, natives: Any, mine: Any, call: Callable[[], Any], where: str
    ) -> None:
        if isinstance(step, Op) and step.template.writes:
            raise Disagreement("written", f"{where} writes, and its answer has other bits")
        lockstep = Lockstep()
        _C.set_answering(True)
        try:
            with lockstep:
                call()
        except Disagreement as found:
            raise Disagreement(found.kind, f"{where}: {found.text}") from found
        finally:
            _C.set_answering(False)
        self.totals.judged += lockstep.judged
        _add_counts(self.totals.how, lockstep.how)
        if isinstance(step, Gradient):
            for index, (native, other) in enumerate(zip(natives, mine, strict=True)):
                if isinstance(native, torch.Tensor):
                    check_kept(native, other, self.native[step.seed], f"{where}: output {index}")
        elif not lockstep.judged:
            raise Disagreement(
                "values", f"{where}: differs, and no operator of it does when repeated"
            )

    # --- values ---

    def _add_plain(self, native: Any, mine: Any) -> None:
        self.native.append(native)
        self.mine.append(mine)
        self._memory_of.append(None)

    def _add(self, native: torch.Tensor, mine: torch.Tensor, where: str = "") -> _Memory | None:
        """Numbers a pair of tensors, and finds what memory they share with earlier ones."""
        number = len(self.native)
        self._add_plain(native, mine)
        if native.untyped_storage().nbytes() == 0:
            return None
        at, mine_at = native.untyped_storage().data_ptr(), mine.untyped_storage().data_ptr()
        memory, other = self._native_at.get(at), self._mine_at.get(mine_at)
        if memory is not other:
            raise Disagreement(
                "alias", f"{where} shares memory {_with(other)}, native's {_with(memory)}"
            )
        if memory is None:
            sizes = [one.untyped_storage().nbytes() for one in (native, mine)]
            if sizes[0] != sizes[1] and not reach(native) == sizes[1] < sizes[0]:
                raise Disagreement("metadata", f"{where}: {sizes[1]} bytes, native {sizes[0]}")
            memory = _Memory(native, mine, number)
            self._native_at[at] = self._mine_at[mine_at] = memory
        else:
            self.totals.aliased += 1
        self._memory_of[number] = memory
        offset = native.storage_offset() * native.element_size()
        kind = (native.dtype, tuple(native.size()), native.stride(), offset % 64 == 0)
        self._by_kind.setdefault(kind, []).append(number)
        return memory


def _with(memory: _Memory | None) -> str:
    return f"with v{memory.value}" if memory is not None else "with nothing"


def _put(argument: Any, places: Sequence[int], values: Sequence[Any]) -> Any:
    if isinstance(argument, Slot):
        return values[places[argument.index]]
    if isinstance(argument, Named):
        return argument.value
    if isinstance(argument, list):
        return [_put(element, places, values) for element in argument]
    return argument


def _name(step: Op | Gradient) -> str:
    return step.template.function if isinstance(step, Op) else "gradient"


@contextlib.contextmanager
def surroundings(mode: str) -> Iterator[None]:
    """What a program of the mode runs in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.inference_mode() if mode == "inference" else contextlib.nullcontext():
            yield


@dataclass(frozen=True)
class Found:
    """A program whose last step's answers disagree."""

    program: Program
    kind: str
    message: str


def run_drawn(drawer: Drawer, totals: Totals) -> Found | None:
    """Draws a program while it runs; the disagreement, if there is one."""
    run = Run(drawer.mode, totals)
    totals.programs += 1
    before = totals.calls
    with surroundings(drawer.mode):
        try:
            while totals.calls - before < drawer.calls:
                for step in drawer.next_steps(run):
                    run.do(step)
            run.finish()
        except Disagreement as found:
            return Found(Program(drawer.mode, tuple(run.steps)), found.kind, str(found))
    if drawer.mode == "inference":
        totals.inference += totals.calls - before
    return None


def run_program(program: Program) -> Found | None:
    """Replays a program. Raises what a step that makes no sense raises."""
    run = Run(program.mode, Totals())
    with surroundings(program.mode):
        try:
            for step in program.steps:
                run.do(step)
            run.finish()
        except Disagreement as found:
            return Found(Program(program.mode, tuple(run.steps)), found.kind, str(found))
    return None
