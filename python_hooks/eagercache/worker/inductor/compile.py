"""One operator call made into a shared object.

The graph of one node is built by hand and Inductor lowers it. `Tools.lower` takes Inductor's text
before anything is compiled: a graph that is no kernel of its own is refused there, at no cost, and
a text that a launch plan can be made of is left to `Tools.bare`, which builds the kernels of many
calls at once. Otherwise AOTInductor goes on and makes a container.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx

from eagercache.base.toolchain import Compiler, Isa
from eagercache.base.trouble import causes, is_passing
from eagercache.calls.call import Call
from eagercache.calls.texts import named_line
from eagercache.worker.compat import aot_inductor, triton_kernels
from eagercache.worker.inductor.bare import BareBuilder
from eagercache.worker.inductor.call_graph import build_graph, example_inputs
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused
from eagercache.worker.inductor.container import BuildCommands
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.inductor.launch_plan import IndexRange, LaunchPlan
from eagercache.worker.inductor.shape_plan import ShapePlan
from eagercache.worker.inductor.text_takers import TextChecker, TextReader, TextTaker, as_it_is
from eagercache.worker.inductor.vector_math import corrected_container, improved_container

log = logging.getLogger("eagercache")


@dataclass(frozen=True)
class Lowered:
    """A call's generated text, with what came of it: a plan, or a container's file.

    ``exact`` is the plan with Inductor's own functions, where ``plan`` is of one that `vector_math`
    made.
    """

    text: GeneratedText
    plan: LaunchPlan | ShapePlan | None
    container: Path | None
    why_container: str  # what of the text was not understood
    seconds: dict[str, float]
    exact: LaunchPlan | ShapePlan | None = None


# Processes that compile a whole graph's Triton kernels, hundreds of them, at a time: at most.
_MOST_TRITON_COMPILERS = 16


def triton_compilers(processors: int = 0) -> int:
    """So many for ``processors``; 0: half of the machine's, which the background may have."""
    allowed = processors or len(os.sched_getaffinity(0)) // 2
    return min(_MOST_TRITON_COMPILERS, max(1, allowed))


class Tools:
    """What one worker process compiles with. Not thread-safe: one compile at a time.

    ``private`` is a directory that lives as long as the object, for precompiled headers, which are
    kept in ``store``, the store's directory, for other workers.
    """

    processors = 0  # that compiling may use at once; 0 where nobody said

    def __init__(
        self, compiler: Compiler, isa: Isa, private: Path | None, store: Path | None = None
    ) -> None:
        self.cpu_features = tuple(isa.features)  # what its code needs of a processor
        self.commands = BuildCommands(compiler, isa, private, store)
        self.bare = BareBuilder(compiler, isa, private, store)
        self._taker: TextTaker | TextChecker | TextReader | None = None
        aot_inductor.set_text_handler(self._take)

    def _take(self, wrapper: str, kernel: str) -> str | tuple[str, str] | None:
        return None if self._taker is None else self._taker.take(wrapper, kernel)

    def lower(
        self,
        call: Call,
        num_returns: int,
        directory: Path,
        *,
        allow_bare: bool = True,
        graph: torch.fx.GraphModule | None = None,
        ranges: Sequence[IndexRange] = (),
        improves: bool = False,
        contract: str = "",
    ) -> Lowered:
        """Inductor's work on ``call``; the container's compile too where no plan can be made.

        ``directory`` must be private and empty; ``num_returns`` is the number of tensors that
        native returned. ``graph`` stands in the place of the one of the operator alone, and
        ``ranges`` say what its indices must be, all of them where there are any. A plan that
        ``improves`` has the functions and sums of `vector_math`, which are not native's bits. A
        container says that it is of the entry ``contract``. The state of the call must be applied.
        Raises CompileRefused (NoKernelOfItsOwn among them) or CompileFailed.
        """
        begin = time.process_time()
        inputs = example_inputs(call)
        if graph is None:
            graph = build_graph(call, num_returns)
        options = aot_inductor.aot_options(
            directory, self.commands.compiler.path, call.state.num_threads
        )
        taker = TextTaker(call, allow_bare, ranges, improves=improves, contract=contract)
        path = self._compile(graph, inputs, options, directory, taker, seams=True)
        if taker.text is None:
            raise CompileRefused("nothing was generated")
        if taker.plan is None:
            self.commands.end()
        seconds = {"lower": round(time.process_time() - begin, 4), **self.commands.seconds}
        container = None if taker.plan is not None else Path(path)
        return Lowered(taker.text, taker.plan, container, taker.why_container, seconds, taker.exact)

    def container(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[torch.Tensor, ...],
        directory: Path,
        check: Callable[[GeneratedText], None],
        beside: Callable[[], str] | None = None,
        *,
        improves: bool = False,
        draws: bool = False,
        of_training: bool = False,
        contract: str = "",
    ) -> Path:
        """The container of a whole graph, for the calling thread's number of threads, or its GPU.

        ``check`` sees the generated text before it is compiled and may raise CompileRefused;
        ``beside``, called after it, gives C++ to be compiled behind the wrapper's. One that
        ``improves`` has the functions of `vector_math`, on CPU. There gradients of max pools are
        native's. One that ``draws`` random numbers does it by native's operators; what is
        ``of_training`` keeps the graph's order. It says that it is of the entry ``contract``
        (calls/contract.py). Raises CompileRefused or CompileFailed.
        """
        options = aot_inductor.aot_options(
            directory, self.commands.compiler.path, torch.get_num_threads()
        )
        options.update(aot_inductor.aot_graph_options(draws=draws, of_training=of_training))
        for_gpu = any(tensor.is_cuda for tensor in inputs)
        better = improved_container if improves else corrected_container
        taker = TextChecker(check, beside, as_it_is if for_gpu else better, contract)
        if for_gpu:
            path = self._compile_for_gpu(graph, inputs, options, directory, taker)
        else:
            with aot_inductor.max_pool_gradients_by_native():
                path = self._compile(graph, inputs, options, directory, taker)
        if not taker.checked:
            raise CompileRefused("nothing was generated")
        self.commands.end()
        return Path(path)

    def contain_for_gpu(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[torch.Tensor, ...],
        directory: Path,
        check: Callable[[GeneratedText], None],
        contract: str = "",
    ) -> Path:
        """The container of one call on CUDA, with its machine code inside.

        As `container`, but for its layouts, which stay what the call's are, and its few Triton
        kernels, which are compiled in this process.
        """
        options = aot_inductor.aot_options(directory, self.commands.compiler.path, 1)
        options.update(triton_kernels.aot_cuda_options(1))
        taker = TextChecker(check, None, as_it_is, contract)
        path = self._compile(graph, inputs, options, directory, taker, for_gpu=True)
        if not taker.checked:
            raise CompileRefused("nothing was generated")
        self.commands.end()
        return Path(path)

    def _compile_for_gpu(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[torch.Tensor, ...],
        options: dict[str, Any],
        directory: Path,
        taker: TextChecker,
    ) -> str:
        """With processes that compile Triton kernels, and once more without where those fail."""
        compilers = triton_compilers(self.processors)
        triton_kernels.start_triton_compilers(compilers)
        while True:
            options.update(triton_kernels.aot_cuda_options(compilers))
            try:
                return self._compile(graph, inputs, options, directory, taker, for_gpu=True)
            except CompileFailed as failure:
                if compilers == 1 or triton_kernels.OF_A_COMPILER not in str(failure):
                    raise
                log.warning("Triton's compilers failed (%s): compiling one by one", failure)
                self.rest()
                compilers = 1

    @staticmethod
    def rest() -> None:
        """Lets go of what only further whole graphs need soon."""
        triton_kernels.stop_triton_compilers()

    def read_texts(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[torch.Tensor, ...],
        directory: Path,
        read: Callable[[str, str], None],
    ) -> None:
        """Shows ``read`` the texts (wrapper, kernels) that Inductor makes of a graph.

        Nothing is compiled. Raises what ``read`` raises of ours, CompileRefused or CompileFailed.
        """
        options = aot_inductor.aot_options(
            directory, self.commands.compiler.path, torch.get_num_threads()
        )
        self._compile(graph, inputs, options, directory, TextReader(read))

    def _compile(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[torch.Tensor, ...],
        options: dict[str, Any],
        directory: Path,
        taker: TextTaker | TextChecker | TextReader,
        *,
        for_gpu: bool = False,
        seams: bool = False,
    ) -> str:
        self.commands.begin(directory, for_gpu=for_gpu, seams=seams)
        self._taker = taker
        try:
            with torch.no_grad():
                return aot_inductor.aot_compile(graph, inputs, options)
        except BaseException as error:
            self.commands.abandon()
            ours = find_cause(error)
            if ours is not None:
                raise ours from error
            if not isinstance(error, Exception):
                raise
            raise CompileFailed(named_line(error), transient=is_passing(error)) from error
        finally:
            self._taker = None


def find_cause(error: BaseException) -> CompileRefused | CompileFailed | None:
    """Our own exception inside the ones that Inductor wrapped around it."""
    ours = (CompileRefused, CompileFailed)
    found = (one for one in causes(error, handled=True) if isinstance(one, ours))
    return next(found, None)
