"""The worker's half of a module's kernel with symbolic sizes: at which sizes it is right and fast.

The guards are those of the compiled function itself, which is asked (`Guards`). The kernel is
proved on the call that came with the request, at the other sizes that were met, at the smallest and
around vector lengths, and where guards end; and it is timed at sizes from the smallest to the
largest that are quick to try. A size between two that were timed is the kernel's where both were.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagercache.callables.arguments import sized_values, sizes_of
from eagercache.callables.module_identity import Identity
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.outputs import COUNT_OFFSET
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.modules.answers import Answers, decide, time_answers
from eagercache.worker.modules.compile import ModuleResult, open_rows
from eagercache.worker.modules.facts import kernel_facts, output_strides
from eagercache.worker.modules.proof import prove_calls
from eagercache.worker.modules.symbolic import SHAPE_FUNCTION, SymbolicSizes
from eagercache.worker.modules.trace import ModuleGraph
from eagercache.worker.samples.shape_class import SMALLEST, ends, groups, sizes_text
from eagercache.worker.timing import timing

_VECTOR = 16  # elements; the widest of float32, and a multiple of the others'
_EDGES = (SMALLEST, SMALLEST + 1, _VECTOR - 1, _VECTOR, _VECTOR + 1, 2 * _VECTOR + 3)
_DRAWS = ((0, 1.0), (2, 2.0))  # of `prove_calls`, for sizes beside the request's own
# Sizes of a group that are tried when timing; each up to what takes so long.
_TIMED = (SMALLEST, 8, 32, 128, 512, 2048)
_LONGEST_CALL = 0.2
_LARGEST_PROOF = 64  # a proof's call may take so much longer than the request's own

Values = tuple[int, ...]


class Guards:
    """The function beside the kernels."""

    def __init__(self, path: Path, strides: int, counts: Sequence[bool]) -> None:
        """``counts`` says of each open size whether it is a count; ``strides``: how many it gives.

        What else it gives counts as such.
        """
        self._function = getattr(ctypes.CDLL(str(path)), SHAPE_FUNCTION)
        self._function.restype = ctypes.c_int32
        self._strides = max(strides, 1)
        self._offsets = [COUNT_OFFSET if count else 0 for count in counts]

    def admits(self, values: Sequence[int]) -> bool:
        """Whether the kernel holds for these open sizes."""
        return self.numbers(values) is not None

    def numbers(self, values: Sequence[int]) -> list[int] | None:
        """What the function gives for these open sizes; None where the kernel does not hold."""
        given = [value + offset for value, offset in zip(values, self._offsets, strict=True)]
        if min(given) < SMALLEST:
            return None
        sizes = (ctypes.c_int64 * len(given))(*given)
        made = (ctypes.c_int64 * self._strides)()
        return list(made) if self._function(sizes, made) == 0 else None


class Members:
    """The calls of one class, made of the one that came with the request."""

    def __init__(
        self, rebuilt: Transferred, open_sizes: Sequence[tuple[int, int]], guards: Guards
    ) -> None:
        self._rebuilt = rebuilt
        self._open = open_sizes
        self._guards = guards
        sized = sized_values(rebuilt.args, rebuilt.kwargs)
        self.sizes = [sizes_of(value) for value in sized]
        self._are_tensors = [not isinstance(value, int) for value in sized]
        self.own: Values = tuple(self.sizes[tensor][dim] for tensor, dim in open_sizes)
        begin = time.monotonic()
        rebuilt.run()
        self._seconds = time.monotonic() - begin

    def make(self, values: Values) -> Transferred:
        """The call with these open sizes."""
        if values == self.own:
            return self._rebuilt
        wanted = {tensor: list(self.sizes[tensor]) for tensor, _ in self._open}
        for (tensor, dimension), value in zip(self._open, values, strict=True):
            wanted[tensor][dimension] = value
        return self._rebuilt.resized(wanted)

    def elements(self, values: Values) -> int:
        """Of the largest tensor with an open size, as ModuleShapeClass counts them."""
        member = {tensor: list(self.sizes[tensor]) for tensor, _ in self._open}
        for (tensor, dimension), value in zip(self._open, values, strict=True):
            member[tensor][dimension] = value
        tensors = [sizes for place, sizes in member.items() if self._are_tensors[place]]
        return max(map(math.prod, tensors), default=0)

    def seconds(self, values: Values) -> float:
        """About how long the forward takes at most: attention's time goes with the square."""
        # A count costs nothing by itself.
        now, own = (
            math.prod(
                value
                for value, (place, _) in zip(all_values, self._open, strict=True)
                if self._are_tensors[place]
            )
            for all_values in (values, self.own)
        )
        ratio = now / own
        return self._seconds * max(ratio, ratio * ratio)

    def proved(self, met: Sequence[Values]) -> list[Values]:
        """The sizes to prove the kernel at; its own first."""
        admits, together = self._guards.admits, groups(self.own, self._guards.admits)
        base = self.own
        for group in together:  # moderate sizes elsewhere, so that the ends are quick to try
            smaller = _with(base, group, min(base[group[0]], _EDGES[-1]))
            base = smaller if admits(smaller) else base
        chosen = [self.own, *met]
        for group in together:
            smallest, largest = ends(base, group, admits)
            chosen += [_with(base, group, value) for value in (*_EDGES, smallest, largest)]
        for value in _EDGES:
            values = base
            for group in together:
                values = _with(values, group, value)
            chosen.append(values)
        limit = _LARGEST_PROOF * max(self._seconds, 1e-3)
        return [
            values
            for values in dict.fromkeys(chosen)
            if values == self.own or (admits(values) and self.seconds(values) <= limit)
        ]

    def timed(self, met: Sequence[Values]) -> list[Values]:
        """The sizes to time the kernel at; its own first."""
        admits, together = self._guards.admits, groups(self.own, self._guards.admits)
        chosen = [self.own, *met]
        for value in _TIMED:
            values = self.own
            for group in together:
                other = _with(values, group, value)
                values = other if admits(other) else values
            chosen.append(values)
        return [
            values
            for values in dict.fromkeys(chosen)
            if values == self.own or (admits(values) and self.seconds(values) <= _LONGEST_CALL)
        ]


def _with(values: Values, group: Sequence[int], value: int) -> Values:
    return tuple(value if index in group else old for index, old in enumerate(values))


class Met:
    """The sizes of other calls that the program has met, as a request says them."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._rows = description["met"]
        self._open = [tuple(place) for place in description["open"]]

    def values(
        self, own: Values, open_sizes: Sequence[tuple[int, int]], guards: Guards
    ) -> list[Values]:
        """Those of what stayed open."""
        found = []
        for row in self._rows:
            by_place = dict(zip(self._open, row, strict=True))
            values = tuple(by_place[place] for place in open_sizes)
            # Those that became numbers must be the request's own: other sizes are another program.
            if values != own and guards.admits(values):
                found.append(values)
        return list(dict.fromkeys(found))


class ClassJudge:
    """What a request says of the judgement of a class of calls."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._margin = float(request["margin"])
        self._always = request["choose"] == "always"
        self._met = Met(request["description"])

    def _time_sizes(
        self, members: Members, met: Sequence[Values], time_at: Callable[[Values], timing.Timing]
    ) -> tuple[timing.Timing, list[tuple[int, bool]], list[str]]:
        """(own timing, at how many elements the kernel is chosen, ascending, lines for people).

        ``time_at`` times the call with given open sizes.
        """
        own: timing.Timing | None = None
        choice: dict[int, bool] = {}
        lines = []
        for values in members.timed(met)[: 1 if self._always else None]:
            measured = time_at(values)
            own = own or measured
            faster, reason = decide(measured, self._margin)
            elements = members.elements(values)
            if faster or self._always or not measured.disturbed:  # else the nearest size tells
                choice[elements] = choice.get(elements, True) and (faster or self._always)
            lines.append(f"{sizes_text(values)}: {measured.line(reason)}")
        assert own is not None
        return own, sorted(choice.items()), lines


def install_class(
    core: Any,
    module: torch.nn.Module,
    digest: str,
    key: bytes,
    rows: Sequence[Sequence[int]],
    kernel: Any,
) -> None:
    """Has the kernel answer all calls of the module that it admits, as that of ``key``.

    ``digest`` is of the module's identity. Raises ProofFailed.
    """
    core.module_open_sizes(kernel)
    try:
        core.module_install_class(module, digest, key, rows, kernel, [(1, True)])
    except ValueError as error:
        raise ProofFailed(str(error)) from error
    if core.module_class_answers(module, key) != "kernel":
        raise ProofFailed("its guards do not admit the call itself")


def class_facts(
    rows: Sequence[Sequence[int]],
    symbolic: SymbolicSizes,
    proved: Sequence[Values],
    chosen: list[tuple[int, bool]],
    lines: Sequence[str],
) -> dict[str, str]:
    """What an entry says of the class; ``chosen`` and ``lines`` as `ClassJudge` has them."""
    return {
        "sizes": json.dumps(rows),
        "choice": json.dumps(chosen),
        "guards": "; ".join(symbolic.guards())[:2_000],
        "proved_sizes": " ".join(map(sizes_text, proved))[:4_000],
        "timings": "; ".join(lines)[:8_000],
    }


class JudgeSizes(ClassJudge):
    """Proves and times a compiled call as one of a class; stands for `compile._judge`."""

    def __call__(
        self,
        rebuilt: Transferred,
        identity: Identity,
        traced: ModuleGraph,
        path: Path,
        functions: list[list[str]],
        core: Any,
        seconds: dict[str, float],
    ) -> ModuleResult:
        """The result. Raises ProofFailed."""
        assert traced.symbolic is not None
        strides = output_strides(rebuilt, traced.outputs)
        open_sizes = traced.symbolic.open_sizes
        sized = sized_values(rebuilt.args, rebuilt.kwargs)
        counts = [isinstance(sized[place], int) for place, _ in open_sizes]
        guards = Guards(path, sum(map(len, strides)), counts)
        members = Members(rebuilt, open_sizes, guards)
        met = self._met.values(members.own, open_sizes, guards)
        rows = open_rows(rebuilt, traced)
        answers = _ClassAnswers(rebuilt, identity, core)
        try:
            answers.install_class(path, traced, strides, rows)
            begin = time.process_time()
            numerics, errors, proved = self._prove(members, answers, identity, met)
            seconds["prove"] = round(time.process_time() - begin, 3)
            measured, chosen, lines = self._time_sizes(
                members, met, lambda values: _time_at(members.make(values), answers, traced)
            )
        finally:
            answers.use(rebuilt)
            answers.close()
        facts = {
            **kernel_facts("module_sizes", traced, strides, functions, numerics, errors),
            **class_facts(rows, traced.symbolic, proved, chosen, lines),
        }
        return ModuleResult(path, facts, measured, seconds, chosen)

    def _prove(
        self, members: Members, answers: _ClassAnswers, identity: Identity, met: list[Values]
    ) -> tuple[str, tuple[float, float], list[Values]]:
        numerics, worst, native_worst = prove_calls(members.make(members.own), answers, identity)
        proved = members.proved(met)
        for values in proved[1:]:
            member = members.make(values)
            answers.use(member)
            try:
                kind, error, native_error = prove_calls(member, answers, identity, _DRAWS)
            except ProofFailed as failure:
                raise ProofFailed(f"{failure}, sizes {sizes_text(values)}") from failure
            numerics = numerics if kind == "bitwise" else kind
            worst, native_worst = max(worst, error), max(native_worst, native_error)
        return numerics, (worst, native_worst), proved


def _time_at(member: Transferred, answers: _ClassAnswers, traced: ModuleGraph) -> timing.Timing:
    member.draw(seed=0)
    answers.use(member)
    return time_answers(answers, traced)


class _ClassAnswers(Answers):
    """Calls the module through a kernel that its class of sizes has."""

    def install_class(
        self,
        path: Path,
        traced: ModuleGraph,
        strides: list[list[int]],
        rows: Sequence[Sequence[int]],
    ) -> None:
        """Makes the kernel answer calls of all sizes that it admits. Raises ProofFailed."""
        kernel = self.load(path, traced, strides)
        digest = self._identity.digest
        install_class(self._core, self._rebuilt.module, digest, self.watch(), rows, kernel)
