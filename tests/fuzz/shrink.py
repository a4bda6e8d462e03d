"""Makes a failing program small, and writes it down as a script that a person can read.

Every step of the shrinking is a smaller program that is run again: it is kept when it fails in the
same way. Calls are dropped (what they answered becomes data), views become tensors of their own,
layouts contiguous, data small numbers, and sizes smaller; the last may need other kernels, which
are compiled then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuzz.both_ways import Found, Run, Totals, run_program, surroundings
from fuzz.judge import Disagreement
from fuzz.programs import Data, Gradient, Make, Op, Program, Step, View
from fuzz.templates import LAYOUTS, Named, Slot, Spec

MOST_NUMBERS = 20_000  # of a written-down tensor


@dataclass
class _Traced:
    """What a program's steps made: the number of each one's first value, and all values' data."""

    firsts: list[int]
    makes: dict[int, Make]
    count: int
    last: dict[int, Make]  # what the last step takes, as it finds it


def _trace(program: Program) -> _Traced:
    run = Run(program.mode, Totals())
    firsts: list[int] = []
    makes: dict[int, Make] = {}
    last: dict[int, Make] = {}
    with surroundings(program.mode), contextlib.suppress(Disagreement):
        for step in program.steps:
            firsts.append(run.count())
            if step is program.steps[-1]:
                for value in _uses(step):
                    tensor = run.native[value]
                    if isinstance(tensor, torch.Tensor):
                        last[value] = _as_make(tensor, tensor.requires_grad)
            run.do(step)
            for value in range(firsts[-1], run.count()):
                tensor = run.native[value]
                if isinstance(tensor, torch.Tensor):
                    leaf = tensor.requires_grad and isinstance(step, Make)
                    makes[value] = _as_make(tensor, leaf)
    return _Traced(firsts, makes, run.count(), last)


def _as_make(tensor: torch.Tensor, leaf: bool) -> Make:
    """A step that makes a tensor like this one, in memory of its own."""
    tensor = tensor.detach()
    dtype, sizes = str(tensor.dtype).removeprefix("torch."), tuple(tensor.size())
    spec = Spec(dtype, sizes)
    for layout in LAYOUTS:
        candidate = Spec(dtype, sizes, layout)
        strides, offset, _ = candidate.place()
        same_place = offset == tensor.storage_offset() or (offset == 0) == (
            tensor.storage_offset() == 0
        )
        if strides == tensor.stride() and same_place:
            spec = candidate
            break
    strides, offset, elements = spec.place()
    if elements > MOST_NUMBERS:
        return Make(spec, Data(0), leaf)
    memory = torch.zeros(max(elements, 1), dtype=tensor.dtype)
    if tensor.numel():
        # Of an expanded tensor every element is written, the same ones again and again.
        index = torch.arange(memory.numel()).as_strided(sizes, strides, offset)
        memory[index.reshape(-1)] = tensor.reshape(-1)
    return Make(spec, Data(numbers=tuple(memory.tolist())), leaf)


def _uses(step: Step) -> tuple[int, ...]:
    if isinstance(step, View):
        return (step.of,)
    if isinstance(step, Op):
        return step.values
    if isinstance(step, Gradient):
        return (step.of, step.seed, *step.leaves)
    return ()


def _renumbered(step: Step, numbers: dict[int, int]) -> Step:
    """Raises KeyError for a value that is gone."""
    if isinstance(step, View):
        return replace(step, of=numbers[step.of])
    if isinstance(step, Op):
        return replace(step, values=tuple(numbers[value] for value in step.values))
    if isinstance(step, Gradient):
        leaves = tuple(numbers[leaf] for leaf in step.leaves if leaf in numbers)
        return Gradient(numbers[step.of], numbers[step.seed], leaves)
    return step


def without(program: Program, index: int, traced: _Traced) -> Program:
    """The program without a step: what later steps take of it is made from data."""
    steps: list[Step] = []
    numbers: dict[int, int] = {}
    following = 0
    for at, step in enumerate(program.steps):
        first = traced.firsts[at] if at < len(traced.firsts) else traced.count
        last = traced.firsts[at + 1] if at + 1 < len(traced.firsts) else traced.count
        if at != index:
            steps.append(_renumbered(step, numbers))
            for value in range(first, last):
                numbers[value] = following
                following += 1
            continue
        used = {value for later in program.steps[at + 1 :] for value in _uses(later)}
        for value in range(first, last):
            if value in used and not (isinstance(step, Make)):
                steps.append(traced.makes[value])
                numbers[value] = following
                following += 1
    return program.with_steps(steps)


def last_call_alone(program: Program, traced: _Traced) -> Program:
    """The last call, its arguments made from the data that it finds."""
    step = program.steps[-1]
    if not isinstance(step, Op):
        return program
    values = list(dict.fromkeys(step.values))
    numbers = {value: number for number, value in enumerate(values)}
    makes = [traced.last[value] for value in values]
    return program.with_steps([*makes, _renumbered(step, numbers)])


class Shrinker:
    """Shrinks one failing program. Seconds bound the whole."""

    def __init__(
        self,
        found: Found,
        seconds: float = 60.0,
        compiling: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.best = found
        self.attempts = 0
        self._end = time.monotonic() + seconds
        self._compiling = compiling

    def shrink(self) -> Found:
        """The smallest program that was found."""
        self._keep(self.best.program)  # up to its failing step
        with contextlib.suppress(KeyError, IndexError):
            self._keep(last_call_alone(self.best.program, _trace(self.best.program)))
        for _ in range(3):
            before = self.best.program
            self._drop_steps()
            self._simplify(self._plainer())
            self._fewer_numbers()
            if self.best.program == before:
                break
        if self._compiling is not None:
            with self._compiling():
                self._simplify(self._plainer(layouts=True))
                self._simplify(self._smaller())
        return self.best

    def _keep(self, program: Program) -> bool:
        if time.monotonic() > self._end:
            return False
        self.attempts += 1
        try:
            found = run_program(program)
        except Exception:
            return False
        if found is None or found.kind != self.best.kind:
            return False
        self.best = found
        return True

    def _drop_steps(self) -> None:
        index = len(self.best.program.steps) - 1
        while index >= 0:
            if index < len(self.best.program.steps):
                program = self.best.program
                with contextlib.suppress(KeyError):
                    self._keep(without(program, index, _trace(program)))
            index -= 1

    def _simplify(self, candidates: Iterator[Callable[[Program], Program]]) -> None:
        for change in candidates:
            program = change(self.best.program)
            if program != self.best.program:
                self._keep(program)

    def _fewer_numbers(self) -> None:
        """Ones in the place of as many numbers as may be."""
        for index, step in enumerate(self.best.program.steps):
            if not isinstance(step, Make) or step.data.numbers is None:
                continue
            one = True if step.spec.dtype == "bool" else 1
            length = len(step.data.numbers)
            while length >= 1:
                for start in range(0, len(step.data.numbers), length):
                    made = self.best.program.steps[index]
                    assert isinstance(made, Make) and made.data.numbers is not None
                    numbers = list(made.data.numbers)
                    part = numbers[start : start + length]
                    if any(number != one for number in part):
                        numbers[start : start + length] = [one] * len(part)
                        data = Data(numbers=tuple(numbers))
                        self._keep(_changed(index, data=data)(self.best.program))
                length //= 2

    def _plainer(self, layouts: bool = False) -> Iterator[Callable[[Program], Program]]:
        if self.best.program.mode != "plain":
            yield lambda program: replace(program, mode="plain")
        for index, step in enumerate(self.best.program.steps):
            if not isinstance(step, Make):
                continue
            if step.leaf:
                yield _changed(index, leaf=False)
            elements = step.spec.place()[2]
            for data in _plain_data(step.spec, elements):
                yield _changed(index, data=data)
            if step.data.numbers is None and elements <= MOST_NUMBERS:
                yield _written_down(index)
            if layouts and step.spec.layout != "contiguous":
                yield _changed(index, spec=replace(step.spec, layout="contiguous"))

    def _smaller(self) -> Iterator[Callable[[Program], Program]]:
        makes = [step for step in self.best.program.steps if isinstance(step, Make)]
        for size in sorted({n for step in makes for n in step.spec.sizes if n > 1}, reverse=True):
            for smaller in sorted({1, 2, 3, size // 2} - {0, size}):
                if smaller < size:
                    yield _resized(size, smaller)


def _changed(index: int, **fields: Any) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        if index >= len(program.steps) or not isinstance(program.steps[index], Make):
            return program
        steps = list(program.steps)
        steps[index] = replace(steps[index], **fields)
        return program.with_steps(steps)

    return change


def _written_down(index: int) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        traced = _trace(program)
        step = program.steps[index]
        made = traced.makes.get(traced.firsts[index])
        if not isinstance(step, Make) or made is None or made.spec != step.spec:
            return program
        return _changed(index, data=made.data)(program)

    return change


def _plain_data(spec: Spec, elements: int) -> Iterator[Data]:
    if spec.dtype == "bool":
        patterns: list[list[Any]] = [[True], [True, False]]
    elif spec.dtype in ("uint8",) or spec.values == "unit":
        patterns = [[1], [0, 1]]
    else:
        patterns = [[1], [1, -2, 3]]
    if getattr(torch, spec.dtype).is_floating_point:
        patterns.append([0.5, -1.25, 2.0, 0.1])
    for pattern in patterns:
        yield Data(numbers=tuple(pattern[i % len(pattern)] for i in range(max(elements, 1))))


def _resized(old: int, new: int) -> Callable[[Program], Program]:
    def size(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(new if n == old else n for n in sizes)

    def argument(value: Any) -> Any:
        if isinstance(value, list) and all(type(n) is int for n in value):
            return list(size(value))
        return value

    def change(program: Program) -> Program:
        steps: list[Step] = []
        for step in program.steps:
            if isinstance(step, (Make, View)):
                step = replace(step, spec=replace(step.spec, sizes=size(step.spec.sizes)))
            elif isinstance(step, Op):
                arguments = tuple(argument(value) for value in step.template.arguments)
                step = replace(step, template=replace(step.template, arguments=arguments))
            steps.append(step)
        return program.with_steps(steps)

    return change


_HEAD = '''"""A disagreement that `make fuzz` found: run it with the package on the path.

{about}
"""

import warnings

import torch

import eagercache

warnings.simplefilter("ignore")
torch.set_num_threads(1)
inf, nan = float("inf"), float("nan")


def strided(numbers, dtype, sizes, strides, offset):
    return torch.tensor(numbers, dtype=dtype).as_strided(sizes, strides, offset)


def attempt(call):
    try:
        answer = call()
    except Exception as error:
        return [f"{{type(error).__name__}}: {{error}}"]
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


'''

_TAIL = """

def described(value):
    if not isinstance(value, torch.Tensor):
        return value
    version = "inference" if value.is_inference() else value._version
    return (value.dtype, tuple(value.size()), value.stride(), value.storage_offset(),
            value.requires_grad, f"version {version}")


def same(a, b):
    if described(a) != described(b):
        return False
    if not isinstance(a, torch.Tensor):
        return True
    a, b = a.detach(), b.detach()
    equal = (a == b) | (a.isnan() & b.isnan())
    if a.is_floating_point():
        equal &= (torch.signbit(a) == torch.signbit(b)) | a.isnan()
    return bool(equal.all())


native = program()
eagercache.enable("all", devices=["cpu"], on_miss="wait", choose="always")
program()  # kernels are made
kernels = program()
eagercache.disable()
differ = [name for name in native if not same(native[name], kernels[name])]
for name in differ:
    print(f"{name}\\n  native   {described(native[name])}\\n{native[name]}")
    print(f"  kernels  {described(kernels[name])}\\n{kernels[name]}")
print(f"{len(differ)} of {len(native)} values differ")
raise SystemExit(1 if differ else 0)
"""


def script(found: Found, about: str) -> str:
    """A program of its own that shows the disagreement: exit status 1 while it is there."""
    program = found.program
    traced = _trace(program)
    lines = ["def program():", "    v = {}"]
    indent = "    "
    if program.mode == "inference":
        lines.append("    with torch.inference_mode():")
        indent = "        "
    for at, step in enumerate(program.steps):
        first = traced.firsts[at] if at < len(traced.firsts) else traced.count
        lines += [indent + line for line in _lines(step, first, traced)]
    lines.append("    return v")
    return _HEAD.format(about=about) + "\n".join(lines) + "\n" + _TAIL


def _lines(step: Step, first: int, traced: _Traced) -> list[str]:
    if isinstance(step, Make):
        strides, offset, _ = step.spec.place()
        made = step if step.data.numbers is not None else traced.makes.get(first, step)
        numbers = list(made.data.numbers or [0])
        text = _repeated(numbers)
        place = f"torch.{step.spec.dtype}, {step.spec.sizes}, {strides}, {offset}"
        leaf = ".requires_grad_()" if step.leaf else ""
        return [f"v[{first}] = strided({text}, {place}){leaf}"]
    if isinstance(step, View):
        strides, _, _ = step.spec.place()
        return [
            f"v[{first}] = v[{step.of}].as_strided({step.spec.sizes}, {strides}, {step.offset})"
        ]
    if isinstance(step, Gradient):
        leaves = ", ".join(f"v[{leaf}]" for leaf in step.leaves)
        call = (
            f"torch.autograd.grad([v[{step.of}]], [{leaves}], [v[{step.seed}]], "
            "retain_graph=True, allow_unused=True)"
        )
    else:
        arguments = [_text(argument, step.values) for argument in step.template.arguments]
        arguments += [f"{n}={_text(value, step.values)}" for n, value in step.template.keywords]
        call = f"{step.template.function}({', '.join(arguments)})"
    return [
        f"for i, answer in enumerate(attempt(lambda: {call})):",
        f"    v[{first} + i] = answer",
    ]


def _repeated(numbers: list[Any]) -> str:
    """A list, or the part of it that it repeats, or the runs of equal numbers."""
    for length in (1, 2, 3, 4):
        part = (numbers[:length] * (len(numbers) // length + 1))[: len(numbers)]
        if len(numbers) > 2 * length and repr(part) == repr(numbers):
            times = -(-len(numbers) // length)
            return f"{numbers[:length]} * {times}"
    runs: list[tuple[str, int]] = []
    for number in map(repr, numbers):
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    if 4 * len(runs) < len(numbers):
        return " + ".join(f"[{number}] * {times}" for number, times in runs)
    return repr(numbers)


def _text(argument: Any, values: Sequence[int]) -> str:
    if isinstance(argument, Slot):
        return f"v[{values[argument.index]}]"
    if isinstance(argument, Named):
        return f"torch.{argument.name}"
    if isinstance(argument, list):
        return "[" + ", ".join(_text(element, values) for element in argument) + "]"
    return repr(argument)
