"""One operator call made into a shared object.

The graph of one node is built by hand and Inductor lowers it. `Tools.lower` takes Inductor's text
before anything is compiled: a graph that is no kernel of its own is refused there, at no cost, and
a text that a launch plan can be made of is left to `Tools.bare`, which builds the kernels of many
calls at once. Otherwise AOTInductor goes on and makes a container.
"""

from __future__ import annotations

import functools
import logging
import operator
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
from eagercache.calls import contract as contracts
from eagercache.calls.call import Call
from eagercache.calls.description import TensorSpec
from eagercache.calls.numerics import in_double
from eagercache.worker.compat import aot_inductor, triton_kernels
from eagercache.worker.inductor.bare import BareBuilder
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused
from eagercache.worker.inductor.container import SEAMS, BuildCommands
from eagercache.worker.inductor.foreach import each_alone
from eagercache.worker.inductor.generated_text import GeneratedText, admit, read_generated_text
from eagercache.worker.inductor.launch_plan import IndexRange, LaunchPlan, read_launch_plan
from eagercache.worker.inductor.shape_plan import ShapePlan
from eagercache.worker.inductor.vector_math import (
    corrected,
    corrected_container,
    improved,
    improved_container,
)
from eagercache.worker.inductor.wrapper_text import NotUnderstood
from eagercache.worker.samples.ordinary_operands import looked_at, ordinary_inputs

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


def build_graph(
    call: Call, num_returns: int, sizes: Sequence[tuple[int, int]] = ()
) -> torch.fx.GraphModule:
    """The graph of one node: a placeholder per tensor, everything else baked in.

    It returns what the operator makes anew. What the operator writes the graph writes too: Inductor
    turns that into kernels that write their inputs. ``num_returns`` tells a list's length.
    ``sizes`` are (tensor, dimension) pairs whose values follow the tensors' in `Call.bind`.
    """
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"arg{i}") for i in range(len(call.tensors))]
    values = [
        _promote_as_number(graph, call, node, spec)
        for node, spec in zip(placeholders, call.tensors, strict=True)
    ]
    values += [
        graph.call_function(torch.ops.aten.sym_size.int, (placeholders[tensor], dimension))
        for tensor, dimension in sizes
    ]
    args, kwargs = call.bind(values)
    if call.name.startswith("aten::_foreach_"):
        parts = each_alone(graph, call.op, args, kwargs)
        if parts is not None:
            graph.output(tuple(parts) if call.fresh else ())
            return torch.fx.GraphModule(torch.nn.Module(), graph)
    if in_double(call):
        wide = graph.call_function(torch.ops.aten._to_copy.default, (args[0],), _DOUBLE)
        node = graph.call_function(call.op, (wide, *args[1:]), kwargs)
        made = [node]
        if len(call.op._schema.returns) > 1:
            made = [graph.call_function(operator.getitem, (node, i)) for i in (0, 1)]
        to = {"dtype": call.tensors[0].dtype}
        graph.output(
            tuple(graph.call_function(torch.ops.aten._to_copy.default, (m,), to) for m in made)
        )
        return torch.fx.GraphModule(torch.nn.Module(), graph)
    node = graph.call_function(_marked_form(call), tuple(args), kwargs)
    returns = call.op._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        graph.output((node,) if call.fresh else ())
    else:
        wanted = call.fresh if len(returns) > 1 else range(num_returns if call.fresh else 0)
        graph.output(tuple(graph.call_function(operator.getitem, (node, i)) for i in wanted))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


_DOUBLE = {"dtype": torch.float64}


def _marked_form(call: Call) -> torch._ops.OpOverload:
    """The operator, or one that does the same and whose schema marks what it writes."""
    if call.written and call.name == "aten::native_batch_norm":
        return torch.ops.aten._native_batch_norm_legit.default
    return call.op


def _category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def _promote_as_number(
    graph: torch.fx.Graph, call: Call, node: torch.fx.Node, spec: TensorSpec
) -> torch.fx.Node:
    """``node`` in a dtype that promotes as native lets a Python number promote.

    In the graph it is an ordinary 0-dim tensor, which outranks what a number does not: 0-dim
    tensors of its category, and the default dtype where no other argument is of its category.
    """
    if not spec.wrapped:
        return node
    category = _category(spec.dtype)
    others = [other for other in call.tensors if not other.wrapped]
    top = max((_category(other.dtype) for other in others), default=-1)
    peers = [other for other in others if _category(other.dtype) == max(top, category)]
    if any(other.sizes for other in peers):
        return node
    if top >= category:
        dtype = functools.reduce(torch.promote_types, [other.dtype for other in peers])
        if top > category:
            # Only a complex peer is raised by a float's width; integers and booleans have none.
            dtype = dtype.to_real() if category == 2 else spec.dtype
    elif category == 2:
        dtype = call.state.default_dtype
    elif category == 3:
        dtype = call.state.default_dtype.to_complex()
    else:
        return node
    if dtype == spec.dtype:
        return node
    return graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})


def example_inputs(call: Call) -> tuple[torch.Tensor, ...]:
    """Tensors of the call's metadata for tracing; numbers as 0-dim tensors of their own dtype."""
    sample = call.sample("ones", seed=0)
    return tuple(
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=spec.dtype)
        for value, spec in zip(sample.values, call.tensors, strict=True)
    )


# Processes that compile a whole graph's Triton kernels, hundreds of them, at a time: at most.
_MOST_TRITON_COMPILERS = 16


def _triton_compilers() -> int:
    """Half the processors, as all that is compiled in the background takes no more."""
    return min(_MOST_TRITON_COMPILERS, max(1, len(os.sched_getaffinity(0)) // 2))


class Tools:
    """What one worker process compiles with. Not thread-safe: one compile at a time.

    ``private`` is a directory that lives as long as the object, for precompiled headers; that of
    bare kernels is kept in ``store``, the store's directory, for other workers.
    """

    def __init__(
        self, compiler: Compiler, isa: Isa, private: Path | None, store: Path | None = None
    ) -> None:
        self.cpu_features = tuple(isa.features)  # what its code needs of a processor
        self.commands = BuildCommands(compiler, isa, private)
        self.bare = BareBuilder(compiler, isa, private, store)
        self._taker: _TextTaker | _TextChecker | _TextReader | None = None
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
        taker = _TextTaker(call, allow_bare, ranges, improves=improves, contract=contract)
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
        contract: str = "",
    ) -> Path:
        """The container of a whole graph, for the calling thread's number of threads, or its GPU.

        ``check`` sees the generated text before it is compiled and may raise CompileRefused;
        ``beside``, called after it, gives C++ to be compiled behind the wrapper's. One that
        ``improves`` has the functions of `vector_math`, on CPU. There gradients of max pools are
        native's. One that ``draws`` random numbers does it by native's operators. It says that it
        is of the entry ``contract`` (calls/contract.py). Raises CompileRefused or CompileFailed.
        """
        options = aot_inductor.aot_options(
            directory, self.commands.compiler.path, torch.get_num_threads()
        )
        options.update(aot_inductor.aot_graph_options(draws=draws))
        for_gpu = any(tensor.is_cuda for tensor in inputs)
        better = improved_container if improves else corrected_container
        taker = _TextChecker(check, beside, _as_it_is if for_gpu else better, contract)
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
        taker = _TextChecker(check, None, _as_it_is, contract)
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
        taker: _TextChecker,
    ) -> str:
        """With processes that compile Triton kernels, and once more without where those fail."""
        compilers = _triton_compilers()
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
        self._compile(graph, inputs, options, directory, _TextReader(read))

    def _compile(
        self,
        graph: torch.fx.GraphModule,
        inputs: tuple[torch.Tensor, ...],
        options: dict[str, Any],
        directory: Path,
        taker: _TextTaker | _TextChecker | _TextReader,
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
            raise CompileFailed(_one_line(error), transient=is_passing(error)) from error
        finally:
            self._taker = None


def _made_for(contract: str) -> str:
    """The text behind a container's that says of which entry it is."""
    return contracts.definition([contract]) if contract else ""


def _as_it_is(kernel: str) -> str:
    return kernel


class _TextChecker:
    """Shows a whole graph's generated text to somebody, and has it compiled."""

    def __init__(
        self,
        check: Callable[[GeneratedText], None],
        beside: Callable[[], str] | None,
        better: Callable[[str], str],
        contract: str,
    ) -> None:
        self._contract = contract
        self._check = check
        self._beside = beside
        self._better = better
        self.checked = False

    def take(self, wrapper: str, kernel: str) -> tuple[str, str]:
        """The texts that AOTInductor is to make a container of."""
        self._check(read_generated_text(wrapper, kernel))
        self.checked = True
        beside = self._beside() if self._beside else ""
        return wrapper + beside + _made_for(self._contract), self._better(kernel)


class _TextReader:
    """Shows the generated text to somebody, who is content with it."""

    def __init__(self, read: Callable[[str, str], None]) -> None:
        self._read = read

    def take(self, wrapper: str, kernel: str) -> str | None:
        """Any string: nothing is to be compiled."""
        self._read(wrapper, kernel)
        return "read"


class _TextTaker:
    """What becomes of the generated text of one call."""

    def __init__(
        self,
        call: Call,
        allow_bare: bool,
        ranges: Sequence[IndexRange] = (),
        *,
        improves: bool = False,
        contract: str = "",
    ) -> None:
        self._beside = SEAMS + _made_for(contract)
        self._call = call
        self._ranges = ranges
        self._allow_bare = allow_bare
        self._improves = improves
        self.text: GeneratedText | None = None
        self.plan: LaunchPlan | None = None
        self.exact: LaunchPlan | None = None
        self.why_container = ""

    def take(self, wrapper: str, kernel: str) -> str | tuple[str, str]:
        """The text is in the plan: any string. Two texts: AOTInductor is to make a container."""
        self.text = read_generated_text(wrapper, kernel)
        admit(self.text, self._call, checked=bool(self._ranges))
        if not self._allow_bare:
            admit(self.text, self._call)
            if looked_at(self._call):
                raise CompileRefused("its weights are to be looked at, and a bare kernel failed")
            self.why_container = "a bare kernel did not do"
            return wrapper + self._beside, corrected_container(kernel)
        try:
            self.plan = self._read_plan(wrapper, corrected(kernel))
            if self._improves:
                self.exact = self.plan
                self.plan = self._read_plan(wrapper, improved(kernel), distinct=True)
        except NotUnderstood as error:
            admit(self.text, self._call)  # a container checks nothing before it runs
            if self._call.written:
                raise CompileRefused(
                    f"it writes its arguments, and its text has {error}"
                ) from error
            if looked_at(self._call):
                raise CompileRefused(
                    f"its weights are to be looked at, and its text has {error}"
                ) from error
            self.why_container = str(error)
            return wrapper + self._beside, corrected_container(kernel)
        refuse_other_writes(self.plan, self._call)
        return "bare"

    def _read_plan(self, wrapper: str, kernel: str, *, distinct: bool = False) -> LaunchPlan:
        plan = read_launch_plan(wrapper, kernel, distinct=distinct)
        return plan.with_checks([*self._ranges, *ordinary_inputs(self._call)])


def refuse_other_writes(plan: LaunchPlan, call: Call) -> None:
    """Raises CompileRefused unless the plan writes what the call's operator writes."""
    if bool(plan.writes) != bool(call.written):
        raise CompileRefused("the generated code does not write what the operator writes")
    if not call.written.issuperset(plan.writes):
        raise CompileRefused("the generated code writes an argument that the operator reads")


def find_cause(error: BaseException) -> CompileRefused | CompileFailed | None:
    """Our own exception inside the ones that Inductor wrapped around it."""
    ours = (CompileRefused, CompileFailed)
    found = (one for one in causes(error, handled=True) if isinstance(one, ours))
    return next(found, None)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
