"""Calls of a module through its kernel or through its forward, and what they take."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagercache.callables import call_hooks
from eagercache.callables.module_identity import Identity
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.outputs import building
from eagercache.callables.surroundings import casts_kept, drawing_from, torch_states
from eagercache.callables.written_tensors import counters
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.graphs.dropout_masks import Draw
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.trace import ModuleGraph
from eagercache.worker.timing import cuda_timing, timing

if TYPE_CHECKING:
    from eagercache.worker.modules.training_graphs import TrainingGraphs


# A tensor's word in a key (argument_words.h): its tag, and whether its memory is aligned and it is
# marked as static. Here it has memory of its own, and no mark.
_TENSOR, _OF_MEMORY = 11, 1 << 48 | 1 << 50
# The tag of the word that counts the tensors, before those that say which of them need gradients
# (training.cc).
_GRADIENTS = 0xF1


def needed_gradients(key: bytes, count: int) -> list[bool] | None:
    """Which of ``count`` tensors, the module's and the call's, needed gradients at a call.

    None where its key does not say.
    """
    words = _words(key)
    tag = _GRADIENTS | count << 8
    if words.count(tag) != 1:
        return None
    bits = words[words.index(tag) + 1 :]
    if len(bits) * 64 < count:
        return None
    return [bool(bits[index // 64] >> index % 64 & 1) for index in range(count)]


def _words(key: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(key) // 8}Q", key)


def _kinds(key: bytes) -> list[int]:
    """The words of a call's key, without what a tensor's memory is in one process."""
    words = _words(key)
    return [word & ~_OF_MEMORY if word & 0xFF == _TENSOR else word for word in words]


class Answers:
    """Calls the module through its kernel or through its forward."""

    def __init__(self, rebuilt: Transferred, identity: Identity, core: Any) -> None:
        self._rebuilt = rebuilt
        self._core = core
        self._identity = identity
        self.noise: tuple[Draw, ...] = ()  # what each call draws
        self.drawn: list[Any] = []  # what torch's generators were at after the last answer

    def install(self, path: Path, traced: ModuleGraph, strides: list[list[int]]) -> None:
        """Makes the kernel answer. Raises ProofFailed when it does not."""
        self.put(self.load(path, traced, strides))

    def load(self, path: Path, traced: ModuleGraph, strides: list[list[int]]) -> Any:
        """The core's kernel out of a container."""
        self.noise = traced.noise
        return self._core.load_module(
            [str(path)],
            str(traced.device),
            traced.inputs,
            traced.ranges,
            strides,
            **building(traced.outputs, len(strides)),
            writes=traced.writes,
            checks=traced.checks,
            noise=[one.row() for one in traced.noise],
        )

    def use(self, member: Transferred) -> None:
        """Calls the same module with other arguments from now on."""
        self._rebuilt = member

    def put(self, kernel: Any) -> None:
        """Makes a loaded kernel answer. Raises ProofFailed when it does not."""
        key = self.watch()
        self._core.module_install(self._rebuilt.module, self._identity.digest, key, kernel)

    def watch(self) -> bytes:
        """Has the core watch the module; the key of its call. Raises ProofFailed."""
        module = self._rebuilt.module
        keys: list[bytes] = []
        self._core.set_module_handlers(
            None, None, lambda _module, _args, _kwargs, key, *_: keys.append(key), None
        )
        call_hooks.install_hooks(self._core)
        self._core.set_answering(True)
        self._core.set_modules_active(True)
        self._core.module_adopt(module)
        stores = self._rebuilt.objects.stores
        rows = {}
        if stores is not None:
            stores.settle()
            rows = stores.rows()
        paths = [path for path, _ in self._identity.modules]
        if not self._core.module_set_guard(
            module,
            self._identity.guard_entries({paths[number]: row for number, row in rows.items()}),
            self._identity.digest,
            self._core.module_version(module),
            takes_others=stores is not None,
        ):
            raise ProofFailed("the module changes while it is looked at")
        self._rebuilt.run()
        if not keys:
            raise ProofFailed(f"the call steps aside: {self._aside()}")
        if self._rebuilt.key and _kinds(self._rebuilt.key) != _kinds(keys[0]):
            raise CompileRefused("its forward changes what kind of arguments it is called with")
        return keys[0]

    def _aside(self) -> str:
        for row in self._core.module_stats():
            if row["module"] is self._rebuilt.module:
                return ", ".join(row["aside_reasons"]) or "each of its calls assigns to it"
        return "the module is not known"

    def _hits(self) -> int:
        return sum(
            row["hits"]
            for row in self._core.module_stats()
            if row["module"] is self._rebuilt.module
        )

    def by_kernel(self) -> Any:
        """The kernel's answer. Raises ProofFailed when the forward answered."""
        before = self._hits()
        answer = self._run()
        if self._hits() != before + 1:
            raise ProofFailed(f"the kernel did not answer: {self._aside()}")
        return answer

    def by_forward(self) -> Any:
        """The forward's answer."""
        with self.forward_alone():
            return self._run()

    def _run(self) -> Any:
        """A call, which draws the same each time."""
        if not self.noise:
            return self._rebuilt.run()
        with drawing_from(0):
            answer = self._rebuilt.run()
            self.drawn = torch_states()
        return answer

    @contextlib.contextmanager
    def forward_alone(self) -> Iterator[None]:
        """No kernel answers meanwhile."""
        self._core.set_modules_active(False)
        try:
            yield
        finally:
            self._core.set_modules_active(True)

    def run(self, by_kernel: bool, calls: int) -> None:
        """Makes calls whose answers nobody waits for."""
        module, args, kwargs = self._rebuilt.module, self._rebuilt.args, self._rebuilt.kwargs
        objects = self._rebuilt.objects
        self._core.set_modules_active(by_kernel)
        if objects.may_change or self._rebuilt.writes:  # on both sides
            counted = counters(self._rebuilt.written_arguments, self._rebuilt.buffers)
            for _ in range(calls):
                module(*args, **kwargs)
                objects.restore()
                counted.restore()
        else:
            for _ in range(calls):
                module(*args, **kwargs)
        self._core.set_modules_active(True)

    def time(self, pairs: int, calls: int) -> list[tuple[float, float]]:
        """Nanoseconds a call (forward, kernel), in alternation; see `timing.time_call`."""
        results = []
        for _ in range(pairs):
            row = []
            for by_kernel in (False, True):
                begin = time.perf_counter_ns()
                self.run(by_kernel, calls)
                row.append((time.perf_counter_ns() - begin) / calls)
            results.append((row[0], row[1]))
        return results

    def close(self) -> None:
        """Leaves nothing of this module behind in the core."""
        self._core.set_modules_active(False)
        self._core.set_answering(False)
        self._core.module_forget(self._rebuilt.module)


def time_answers(answers: Answers, traced: ModuleGraph | TrainingGraphs) -> timing.Timing:
    """Times the forward and the kernel, alone among this user's workers."""
    with timing.machine_to_itself(), casts_kept():
        if traced.device.type == "cuda":
            return cuda_timing.time_sides(answers.run)
        return timing.time_call(answers)  # type: ignore[arg-type]


def decide(measured: timing.Timing, margin: float) -> tuple[bool, str]:
    """(whether the kernel is faster, why not), by the rule of the device that was timed."""
    if isinstance(measured, cuda_timing.CudaTiming):
        return cuda_timing.decide_cuda(measured, margin)
    return timing.decide(measured, margin)
