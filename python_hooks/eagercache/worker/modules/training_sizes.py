"""A kernel with symbolic sizes of calls that need gradients: at which sizes it is right and fast.

As `sizes`, with the backward beside the forward. The function beside the kernels says how all
tensors are laid out that go from one to the other (`TrainingGraphs.see_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_gradient import eager_gradients
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.surroundings import autocast, casts_kept
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.answers import time_answers
from eagercache.worker.modules.compile import ModuleResult, open_rows
from eagercache.worker.modules.proof import SEEDS, SPREADS
from eagercache.worker.modules.sizes import (
    ClassJudge,
    Guards,
    Members,
    Values,
    class_facts,
    install_class,
)
from eagercache.worker.modules.training import core_plan, load_training, training_facts
from eagercache.worker.modules.training_answers import TrainingAnswers
from eagercache.worker.modules.training_graphs import TrainingGraphs
from eagercache.worker.modules.training_proof import prove_training
from eagercache.worker.modules.training_watch import Watched, check_as_watched
from eagercache.worker.samples.shape_class import sizes_text
from eagercache.worker.timing import timing
from eagercache.worker.timing.gpu_memory import with_room

_DRAWS = ((0, 1.0), (2, 2.0))  # of `prove_training`, for sizes beside the request's own


class JudgeTrainingSizes(ClassJudge):
    """Proves and times compiled calls as some of a class; stands for `training._judge`."""

    def __call__(
        self,
        rebuilt: Transferred,
        watched: Watched,
        graphs: TrainingGraphs,
        paths: tuple[Path, Path],
        core: Any,
        seconds: dict[str, float],
        under: Mapping[str, str],
    ) -> ModuleResult:
        """The result. Raises ProofFailed, or CompileRefused."""
        if watched.views:
            raise CompileRefused("no kernel for several sizes: parts of its answer share memory")
        with autocast(under, keeps_casts=False):
            found = _Class(rebuilt, watched, graphs, paths, core)
            met = self._met.values(found.members.own, found.open_sizes, found.guards)
            core.set_eager_gradients(eager_gradients)
            core.set_modules_training(True)
            own = found.call(found.members.own).answers
            try:
                plan = found.install(own)
                proved = with_room(lambda: found.prove(met))
                measured, chosen, lines = self._time_sizes(found.members, met, found.time_at)
            finally:
                own.close()
                core.set_modules_training(False)
            assert graphs.symbolic is not None
            facts = {
                **training_facts(rebuilt, watched, graphs, watched.strides, plan, proved),
                **class_facts(found.rows, graphs.symbolic, found.proved, chosen, lines),
            }
            return ModuleResult(paths[0], facts, measured, seconds, chosen, (paths[1],))


@dataclass(frozen=True)
class _Call:
    """One of them, and how it is made through the kernels or through autograd."""

    member: Transferred
    answers: TrainingAnswers


class _Class:
    """The calls that the compiled kernels are to answer."""

    def __init__(
        self,
        rebuilt: Transferred,
        watched: Watched,
        graphs: TrainingGraphs,
        paths: tuple[Path, Path],
        core: Any,
    ) -> None:
        assert graphs.symbolic is not None
        self.graphs = graphs
        self.open_sizes = graphs.symbolic.open_sizes
        self.proved: list[Values] = []
        self._rebuilt, self._watched, self._core = rebuilt, watched, core
        self._paths = paths
        self.rows = open_rows(rebuilt, graphs)
        self._num_strides = sum(map(len, watched.strides))
        given = self._num_strides + len(graphs.symbolic.numbers)
        self.guards = Guards(paths[0], given, [False] * len(self.open_sizes))
        self.members = Members(rebuilt, self.open_sizes, self.guards)
        self._calls: dict[Values, _Call] = {}

    def call(self, values: Values) -> _Call:
        """The call with these open sizes. Raises ProofFailed."""
        if values not in self._calls:
            member = self.members.make(values)
            member.require_gradients()
            watched = self._watched
            if values != self.members.own:
                with casts_kept():  # as a program's block of autocast does
                    eager = check_as_watched(member, watched)
                if self._saved_bytes(member, values) > eager + eager // 100:
                    text = sizes_text(values)
                    raise ProofFailed(f"more would be kept for the backward, sizes {text}")
            draws = self.graphs.noise_of(self._numbers(values)) or self.graphs.draws_at(values)
            answers = TrainingAnswers(member, watched, draws, self._core)
            self._calls[values] = _Call(member, answers)
        return self._calls[values]

    def install(self, own: TrainingAnswers) -> dict[str, Any]:
        """Makes the kernels answer calls of all sizes that they admit; the plan of one call.

        ``own``: the request's own call. Raises ProofFailed.
        """
        own.draw(SEEDS[0], SPREADS[0])
        plan = core_plan(self._watched, self.graphs, own)
        strides, digest = self._watched.strides, self._watched.identity.digest
        kernel = load_training(self._paths, self.graphs, strides, plan, self._core)
        module = self._rebuilt.module
        install_class(self._core, module, digest, own.watch(), self.rows, kernel)
        return plan

    def time_at(self, values: Values) -> timing.Timing:
        """What both sides take with these open sizes."""
        answers = self.call(values).answers
        answers.draw(SEEDS[0], SPREADS[0])
        return time_answers(answers, self.graphs)

    def prove(self, met: Sequence[Values]) -> tuple[str, float, float]:
        """As `prove_training`, at all sizes. Raises ProofFailed."""
        own = self.call(self.members.own).answers
        numerics, *worst = prove_training(own, self._watched, self._rebuilt)
        self.proved = self.members.proved(met)
        for values in self.proved[1:]:
            call = self.call(values)
            try:
                kind, *errors = prove_training(call.answers, self._watched, call.member, _DRAWS)
            except ProofFailed as failure:
                raise ProofFailed(f"{failure}, sizes {sizes_text(values)}") from failure
            numerics = numerics if kind == "bitwise" else kind
            worst = list(map(max, worst, errors))
        return numerics, worst[0], worst[1]

    def _numbers(self, values: Values) -> list[int]:
        """What the function beside the kernels gives besides the strides of the answers."""
        numbers = self.guards.numbers(values)
        if numbers is None:
            raise ProofFailed(f"its guards do not admit the sizes {sizes_text(values)}")
        return numbers[self._num_strides :]

    def _saved_bytes(self, member: Transferred, values: Values) -> int:
        """As `training.saved_bytes`, of a call with these sizes."""
        numbers, total = iter(self._numbers(values)), 0
        for source, example in zip(self.graphs.saved, self.graphs.backward_examples, strict=False):
            rank = example.dim()
            sizes = [next(numbers) for _ in range(2 * rank)][:rank]
            total += math.prod(sizes) * example.element_size() * (source.kind != "input")
        masks = () if self.graphs.redraws else self.graphs.noise_of(self._numbers(values))
        for one in masks:
            total += math.prod(one.sizes) * one.dtype.itemsize
        tensors = argument_tensors(member.args, member.kwargs)
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return total + sum(tensor.numel() * tensor.element_size() for tensor in memory.values())
