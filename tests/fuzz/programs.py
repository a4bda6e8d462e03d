"""Programs: lists of steps that make tensors, call operators and ask for gradients.

Values are numbered in the order in which steps make them. A step names what it takes by number, so
that a program can be replayed, shrunk and written down. Programs are drawn while they run, since
what an operator can be given next depends on what the last one answered; see `draw_step`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

import torch

from fuzz.templates import Slot, Spec, Template

MODES = ("plain", "inference", "autograd")
BANK_ELEMENTS = 1 << 15
# Parts of a bank: ordinary numbers, small integers, and numbers among NaN, infinities and extremes.
_PARTS = ((0, 0.75), (1, 0.15), (2, 0.10))


@dataclass(frozen=True)
class Data:
    """What a fresh tensor's memory holds: numbers of a bank from `start` on, or the given ones."""

    start: int = 0
    numbers: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Make:
    """A tensor in memory of its own. `leaf`: it requires a gradient."""

    spec: Spec
    data: Data
    leaf: bool = False
    inference: bool = True  # in programs of that mode: made inside of it


@dataclass(frozen=True)
class View:
    """The memory of value `of`, seen as another tensor."""

    of: int
    spec: Spec
    offset: int


@dataclass(frozen=True)
class Op:
    """A call; `values` are what stands in the template's slots."""

    template: Template
    values: tuple[int, ...]


@dataclass(frozen=True)
class Gradient:
    """The gradient of value `of` with respect to `leaves`, `seed` coming from above."""

    of: int
    seed: int
    leaves: tuple[int, ...]


Step = Make | View | Op | Gradient


@dataclass(frozen=True)
class Program:
    """Steps, and the mode that they run in: one of MODES."""

    mode: str
    steps: tuple[Step, ...]

    @property
    def calls(self) -> int:
        """Steps that call operators."""
        return sum(isinstance(step, (Op, Gradient)) for step in self.steps)

    def with_steps(self, steps: Sequence[Step]) -> Program:
        """The same mode, other steps."""
        return replace(self, steps=tuple(steps))


def read(text: str) -> Program:
    """The program whose `repr` the text is."""
    from fuzz.templates import Named

    names: dict[str, Any] = {
        kind.__name__: kind
        for kind in (Program, Make, View, Op, Gradient, Data, Spec, Slot, Named, Template)
    }
    names.update(inf=float("inf"), nan=float("nan"))
    program = eval(text, {"__builtins__": {}}, names)
    assert isinstance(program, Program)
    return program


def make_bank(dtype: str) -> torch.Tensor:
    """Numbers of a dtype, the same in every process: three parts of BANK_ELEMENTS."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(20_261_122)
    count = BANK_ELEMENTS
    if kind.is_complex:
        real = make_bank("float32")
        return torch.complex(real, real.roll(7))
    if kind == torch.bool:
        return torch.randint(0, 2, (3 * count,), generator=generator) > 0
    small = torch.randint(-4, 5, (count,), generator=generator)
    if kind.is_floating_point:
        info = torch.finfo(kind)
        ordinary = torch.randn(count, generator=generator, dtype=torch.float64)
        special = ordinary.roll(11).clone()
        values = torch.tensor(
            [0.0, -0.0, float("nan"), float("inf"), -float("inf"), info.max, info.min, info.eps,
             info.smallest_normal, info.smallest_normal / 2, 1.0, -1.0],
            dtype=torch.float64,
        )  # fmt: skip
    else:
        whole = torch.iinfo(kind)
        ordinary = torch.randint(
            max(whole.min, -100), min(whole.max, 100), (count,), generator=generator
        )
        small = small.clamp(min=max(whole.min, -4))
        special = ordinary.clone()
        values = torch.tensor([whole.min, whole.max, 0, 1], dtype=torch.int64)
    chosen = torch.randint(0, 8, (count,), generator=generator) == 0
    which = torch.randint(0, values.numel(), (count,), generator=generator)
    special = torch.where(chosen, values[which], special)
    return torch.cat([part.to(kind) for part in (ordinary, small, special)])


def unit_bank(dtype: str) -> torch.Tensor:
    """Numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3 * BANK_ELEMENTS, generator=generator, dtype=torch.float64).to(
        getattr(torch, dtype)
    )


class State(Protocol):
    """What a running program has made, for whoever draws its next step."""

    def fitting(self, spec: Spec) -> Sequence[int]:
        """Values with the dtype, sizes, strides and alignment of `spec`."""

    def memories(self, dtype: str, elements: int) -> Sequence[tuple[int, int]]:
        """(value, elements of its memory) where there are at least so many of the dtype."""

    def with_gradient(self) -> Sequence[int]:
        """Values that a gradient can be asked of."""

    def leaves(self) -> Sequence[int]:
        """Values that are leaves and require gradients."""

    def count(self) -> int:
        """How many values there are: the number of the next one."""

    def spec_of(self, value: int) -> Spec:
        """Dtype and sizes of a value, contiguous."""


@dataclass(frozen=True)
class Pool:
    """The templates that programs are drawn from.

    `themes` groups them by the dtype and sizes of their first tensor, so that one program's calls
    have something to do with each other.
    """

    templates: Sequence[Template]
    weights: Sequence[float]
    themes: Mapping[tuple[str, tuple[int, ...]], Sequence[int]]

    @functools.cached_property
    def sums(self) -> list[float]:
        """The running sums of the weights."""
        return list(itertools.accumulate(self.weights))


def draw_mode(rng: Random) -> str:
    """Half plain, the rest in inference mode or with gradients."""
    return rng.choices(MODES, (5, 2, 3))[0]


class Drawer:
    """Draws the steps of one program: `next_steps` until it has as many calls as wanted."""

    def __init__(self, rng: Random, pool: Pool) -> None:
        self.rng = rng
        self.pool = pool
        self.mode = draw_mode(rng)
        self.calls = rng.randint(1, 20)
        theme = pool.templates[self._any_template()].specs[0]
        self._theme = pool.themes[theme.dtype, theme.sizes]
        self._theme_weights = list(itertools.accumulate(pool.weights[i] for i in self._theme))

    def _any_template(self) -> int:
        (index,) = self.rng.choices(range(len(self.pool.templates)), cum_weights=self.pool.sums)
        return index

    def next_steps(self, state: State) -> list[Step]:
        """What makes the next call's arguments, and the call."""
        rng = self.rng
        if self.mode == "autograd" and rng.random() < 0.15:
            steps = self._gradient(state)
            if steps:
                return steps
        if rng.random() < 0.7:
            (index,) = rng.choices(self._theme, cum_weights=self._theme_weights)
        else:
            index = self._any_template()
        return self._call(state, self.pool.templates[index])

    def _call(self, state: State, template: Template) -> list[Step]:
        steps: list[Step] = []
        values: list[int] = []
        following = state.count()
        for slot, spec in enumerate(template.specs):
            step = self._argument(state, spec, written=slot in template.writes, taken=values)
            if isinstance(step, int):
                values.append(step)
            else:
                steps.append(step)
                values.append(following)
                following += 1
        return [*steps, Op(template, tuple(values))]

    def _argument(
        self, state: State, spec: Spec, *, written: bool, taken: Sequence[int]
    ) -> int | Step:
        rng = self.rng
        choice = rng.random()
        if choice < 0.5 and spec.values == "any" and (fitting := state.fitting(spec)):
            value = rng.choice(fitting)
            # The same tensor twice is legal, but nearly always a reason to step aside.
            if value not in taken or rng.random() < 0.2:
                return value
        _, offset, elements = spec.place()
        if choice < 0.65 and spec.values == "any" and spec.numel:
            memories = state.memories(spec.dtype, elements)
            if memories:
                of, room = rng.choice(memories)
                return View(of, spec, self._offset(spec, offset, elements, room))
        part = rng.choices([p for p, _ in _PARTS], [w for _, w in _PARTS])[0]
        # Starts are multiples of 64, so that a written-down program says the same in few digits.
        room = BANK_ELEMENTS - elements - 64
        start = part * BANK_ELEMENTS + 64 * rng.randrange(max(room // 64, 1))
        floating = getattr(torch, spec.dtype).is_floating_point
        leaf = self.mode == "autograd" and floating and rng.random() < (0.1 if written else 0.7)
        return Make(spec, Data(start), leaf, rng.random() < 0.7)

    def _offset(self, spec: Spec, least: int, elements: int, room: int) -> int:
        """A place in the memory with the alignment that the spec's own has."""
        itemsize = getattr(torch, spec.dtype).itemsize
        step = 64 // itemsize
        most = (room - elements) // step
        return least + step * self.rng.randint(0, max(most, 0)) if most > 0 else least

    def _gradient(self, state: State) -> list[Step]:
        of = state.with_gradient()
        leaves = state.leaves()
        if not of or not leaves:
            return []
        value = self.rng.choice(of)
        spec = state.spec_of(value)
        start = 64 * self.rng.randrange((BANK_ELEMENTS - spec.numel - 64) // 64)
        return [Make(spec, Data(start)), Gradient(value, state.count(), tuple(leaves))]
