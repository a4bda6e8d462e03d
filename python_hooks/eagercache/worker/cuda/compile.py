"""One operator call made into CUDA machine code and a launch plan.

Inductor lowers the graph of one node to a Python module of Triton kernels; it is run once, which
lets Inductor tune them, and then taken apart. Neither g++ nor nvcc is run. What cannot be taken
apart becomes a container of AOTInductor's, for which g++ is.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagercache.base.trouble import is_passing
from eagercache.calls.call import Call
from eagercache.calls.texts import named_line
from eagercache.worker.compat import triton_kernels
from eagercache.worker.cuda.final_reductions import with_launches
from eagercache.worker.cuda.forms import APART, FIRST, Form
from eagercache.worker.cuda.open_sizes import CudaShapePlan, make_open_plan, read_open
from eagercache.worker.cuda.plan import CudaPlan, TritonKernel, make_plan
from eagercache.worker.cuda.scalar_text import read_scalar_text
from eagercache.worker.cuda.wrapper import Call as Launched
from eagercache.worker.cuda.wrapper import WrapperText, read_wrapper
from eagercache.worker.inductor.call_graph import TRAPS, build_graph, example_inputs
from eagercache.worker.inductor.commands import CompileFailed, CompileRefused, NoKernelOfItsOwn
from eagercache.worker.inductor.compile import Lowered, Tools, find_cause
from eagercache.worker.inductor.foreach import PREFIX as LISTS
from eagercache.worker.inductor.generated_text import GeneratedText, admit
from eagercache.worker.inductor.shape_plan import Symbols
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

_REDUCES = re.compile(r"@triton_heuristics\.(?!pointwise|template|foreach)\w+")
# The last bit of these is not always native's.
_APPROXIMATES = re.compile(r"\blibdevice\.(?:erf|erfc|tanh|atan2|pow|lgamma)\(")
_CHECKS = re.compile(r"tl\.device_assert\(")
_MIXED_ORDER = re.compile(r"= \(?workspace_\d+\b.*\.sum\(")


@dataclass(frozen=True)
class CudaLowered:
    """A call's generated text with the plan made of it."""

    lowered: Lowered
    plan: CudaPlan
    mixes: bool = False  # one of its kernels reduces over rows and columns


class PlanUnknown(CompileRefused):
    """No launch plan can be made of a generated text, of which ``facts`` are known.

    Nothing else is against a kernel: AOTInductor's container can launch it (`contain`).
    """

    def __init__(self, reason: str, facts: GeneratedText) -> None:
        super().__init__(reason)
        self.facts = facts


def lower(
    call: Call,
    num_returns: int,
    graph: torch.fx.GraphModule | None = None,
    form: Form = FIRST,
) -> CudaLowered:
    """Inductor's and Triton's work on ``call``.

    ``graph`` stands in the place of the one of the operator alone. The state of the call must be
    applied, and the CUDA device usable. Raises CompileRefused (NoKernelOfItsOwn and PlanUnknown
    among them) or CompileFailed.
    """
    for spec in call.tensors:
        if not spec.aligned:
            raise CompileRefused("a tensor is not aligned as the kernels need it")
    begin = time.process_time()
    with form.chosen():
        module, text, wrapper = _generate_understood(call, num_returns, graph, form)
    if _CHECKS.search(text) and not (graph is not None and graph.meta.get(TRAPS)):
        raise CompileRefused("generated code checks values")
    if wrapper.num_inputs != len(call.tensors):
        raise CompileRefused(
            f"the kernel takes {wrapper.num_inputs} tensors, the call has {len(call.tensors)}"
        )
    _tune(module, example_inputs(call))
    try:
        wrapper, kernels = with_launches(wrapper, _kernels_of(module), _lower_small)
        plan = make_plan(wrapper, kernels)
    except (ValueError, AttributeError, KeyError) as error:
        what = "text" if isinstance(error, NotUnderstood) else "kernels"
        raise PlanUnknown(
            f"generated {what} not understood: {error}", _facts(text, call, num_returns)
        ) from error
    kernels_called = tuple(each.kernel for each in wrapper.calls if isinstance(each, Launched))
    facts = _facts(text, call, len(wrapper.outputs), kernels_called)
    seconds = {"lower": round(time.process_time() - begin, 4)}
    return CudaLowered(Lowered(facts, None, None, "", seconds), plan, "RSPLIT_SIZE" in text)


def lower_open(
    call: Call,
    num_returns: int,
    graph: torch.fx.GraphModule,
    fakes: Sequence[torch.Tensor],
    assumed: Callable[[], Symbols],
    pattern: Mapping[str, Any],
) -> tuple[Lowered, CudaShapePlan]:
    """The same with some sizes open: of ``graph``, which takes ``fakes`` of the call's tensors.

    ``assumed`` says, once Inductor has lowered it, what it took for granted of the open sizes.
    ``pattern`` is the request's. Raises CompileRefused or CompileFailed.
    """
    for spec in call.tensors:
        if not spec.aligned:
            raise CompileRefused("a tensor is not aligned as the kernels need it")
    begin = time.process_time()
    options = {**triton_kernels.cuda_options(), **APART.options}
    module = _generate(_with_signed_zeros(graph), tuple(fakes), options)
    text = Path(module.__file__).read_text()
    if _CHECKS.search(text):
        raise CompileRefused("generated code checks values")
    try:
        symbols = assumed()
        wrapper = read_open(text, symbols)
    except ValueError as error:
        raise _refusal(text, call, num_returns, error) from error
    _tune(module, example_inputs(call))
    try:
        plan = make_open_plan(wrapper, _kernels_of(module), symbols, pattern)
    except (ValueError, AttributeError, KeyError) as error:
        raise CompileRefused(f"no kernel with symbolic sizes: {error}") from error
    kernels = tuple(each.kernel for each in wrapper.calls if isinstance(each, Launched))
    facts = _facts(text, call, len(wrapper.outputs), kernels)
    seconds = {"lower": round(time.process_time() - begin, 4)}
    return Lowered(facts, None, None, "", seconds), plan


def lower_scalars(
    call: Call,
    num_returns: int,
    graph_of: Callable[[Sequence[float]], torch.fx.GraphModule],
    marks: tuple[Sequence[float], Sequence[float]],
) -> tuple[Lowered, CudaPlan]:
    """The same with numbers of the call as arguments: see `scalar_text.py`.

    ``graph_of`` makes the call's graph with other numbers; ``marks`` are two sets of such numbers.
    Raises CompileRefused or CompileFailed.
    """
    for spec in call.tensors:
        if not spec.aligned:
            raise CompileRefused("a tensor is not aligned as the kernels need it")
    begin = time.process_time()
    common = triton_kernels.cuda_options(together=call.name.startswith(LISTS))
    options = {**common, **APART.options}
    texts = [_generate_text(graph_of(each), example_inputs(call), options) for each in marks]
    if _CHECKS.search(texts[0]):
        raise CompileRefused("generated code checks values")
    try:
        text = read_scalar_text(texts[0], marks[0], texts[1], marks[1])
        wrapper = read_wrapper(text)
        module = _inductors(lambda: triton_kernels.load_module(text, options))
        _tune(module, example_inputs(call))
        plan = make_plan(wrapper, _kernels_of(module), len(marks[0]))
    except NotUnderstood as error:
        reason = _refusal(texts[0], call, num_returns, error)
        if isinstance(reason, NoKernelOfItsOwn):
            raise reason from error
        raise CompileRefused(f"no kernel with numbers as arguments: {error}") from error
    except (ValueError, AttributeError, KeyError) as error:
        raise CompileRefused(f"generated kernels not understood: {error}") from error
    if wrapper.num_inputs != len(call.tensors):
        raise CompileRefused("the kernel takes another number of tensors")
    kernels = tuple(each.kernel for each in wrapper.calls if isinstance(each, Launched))
    facts = _facts(text, call, len(wrapper.outputs), kernels)
    seconds = {"lower": round(time.process_time() - begin, 4)}
    return Lowered(facts, None, None, "", seconds), plan


def _facts(text: str, call: Call, num_outputs: int, kernels: tuple[str, ...] = ()) -> GeneratedText:
    functions = _APPROXIMATES.search(text) is not None
    return GeneratedText(
        num_inputs=len(call.tensors),
        num_outputs=num_outputs,
        num_constants=0,
        kernels=kernels,
        extern_calls=(),
        uses_proxy_executor=False,
        checks_values=False,
        reduces=_REDUCES.search(text) is not None,
        calls_functions=functions,
        approximates=functions,
    )


def contain(
    call: Call,
    num_returns: int,
    graph: torch.fx.GraphModule | None,
    tools: Tools,
    directory: Path,
    unknown: PlanUnknown,
    contract: str,
) -> Lowered:
    """AOTInductor's container of ``call``, in whose text the machine code is.

    After `lower` has raised ``unknown``; ``directory`` is private and empty. A C++ compiler is run,
    and no CUDA toolkit is needed. It says that it is of the entry ``contract``. Raises
    CompileRefused or CompileFailed.
    """
    if call.written:
        raise unknown  # a container allocates what it returns
    begin = time.process_time()
    texts: list[GeneratedText] = []

    def check(text: GeneratedText) -> None:
        admit(text, call)
        texts.append(text)

    graph = build_graph(call, num_returns) if graph is None else copy.deepcopy(graph)
    path = tools.contain_for_gpu(
        _with_signed_zeros(graph), example_inputs(call), directory, check, contract
    )
    text = replace(unknown.facts, kernels=texts[0].kernels)
    seconds = {"lower": round(time.process_time() - begin, 4), **tools.commands.seconds}
    return Lowered(text, None, path, str(unknown), seconds)


def _generate_understood(
    call: Call, num_returns: int, given: torch.fx.GraphModule | None, form: Form
) -> tuple[Any, str, WrapperText]:
    """Inductor's module for ``call``, its text, and what was read of it."""

    def graph() -> torch.fx.GraphModule:
        return build_graph(call, num_returns) if given is None else copy.deepcopy(given)

    # What is done to each tensor of a list has no launch of its own.
    together = call.name.startswith(LISTS)
    # With reductions over rows and columns in one kernel; then, where what eager operators make of
    # its partial results is not understood, each in a kernel of its own.
    common = triton_kernels.cuda_options(together=together)
    for apart in (FIRST, APART):
        own = _with_signed_zeros(graph())
        options = {**common, **form.options, **apart.options}
        module = _generate(own, example_inputs(call), options)
        text = Path(module.__file__).read_text()
        try:
            return module, text, read_wrapper(text)
        except NotUnderstood as error:
            if apart is APART or _MIXED_ORDER.search(text) is None:
                raise _refusal(text, call, num_returns, error) from error
    raise AssertionError("the loop's last round returns or raises")


def _refusal(text: str, call: Call, num_returns: int, error: ValueError) -> CompileRefused:
    if "extern_kernels." in text or "torch.ops.aten." in _body(text):
        return NoKernelOfItsOwn("no kernel of its own")
    if _CHECKS.search(text):
        return CompileRefused("generated code checks values")
    return PlanUnknown(f"generated text not understood: {error}", _facts(text, call, num_returns))


def _generate(
    graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> Any:
    triton_kernels.skip_pattern_setup()
    return _inductors(lambda: triton_kernels.compile_to_module(graph, inputs, options))


def _generate_text(
    graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> str:
    triton_kernels.skip_pattern_setup()
    own = _with_signed_zeros(graph)
    return str(_inductors(lambda: triton_kernels.generate_text(own, inputs, options)))


def _inductors(make: Callable[[], Any]) -> Any:
    """What Inductor makes. Raises CompileRefused or CompileFailed."""
    try:
        with torch.no_grad():
            made = make()
    except Exception as error:
        ours = find_cause(error)
        if ours is not None:
            raise ours from error
        transient = is_passing(error) or isinstance(error, torch.OutOfMemoryError)
        raise CompileFailed(named_line(error), transient=transient) from error
    if made is None:
        raise CompileRefused("nothing was generated")
    return made


def _with_signed_zeros(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """``graph`` with what Triton gives another sign of zero expressed otherwise.

    Triton negates by subtracting from 0, and its maximum of 0 and -0 is the second.
    """
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        with graph.graph.inserting_before(node):
            if node.target == aten.neg.default:
                other = graph.graph.call_function(aten.mul.Scalar, (node.args[0], -1))
            elif node.target in (aten.relu.default, aten.relu_.default):
                below = graph.graph.call_function(aten.le.Scalar, (node.args[0], 0))
                other = graph.graph.call_function(aten.where.ScalarSelf, (below, 0, node.args[0]))
                if node.target == aten.relu_.default:
                    other = graph.graph.call_function(aten.copy_.default, (node.args[0], other))
            else:
                continue
        node.replace_all_uses_with(other)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _body(text: str) -> str:
    start = text.find("def call(")
    return text[start:] if start >= 0 else ""


def _tune(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """Runs the module on data of the call's, so that each kernel's configuration is chosen."""
    with torch.no_grad():
        module.call(list(inputs))
    torch.cuda.synchronize()


def _lower_small(
    graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...]
) -> tuple[WrapperText, dict[str, TritonKernel]]:
    """What is made of a graph beside the call's own. Raises NotUnderstood."""
    module = _generate(graph, inputs, {**triton_kernels.cuda_options(), **APART.options})
    _tune(module, inputs)
    return read_wrapper(Path(module.__file__).read_text()), _kernels_of(module)


def _kernels_of(module: Any) -> dict[str, TritonKernel]:
    return {name: _kernel(*pair) for name, pair in triton_kernels.tuned_kernels(module).items()}


def _kernel(tuner: Any, launcher: Any) -> TritonKernel:
    """Raises AttributeError, KeyError or ValueError when Inductor's objects are unknown."""
    kernel, cubin, types = launcher.eagercache_parts
    if cubin is None:
        raise ValueError("a kernel's machine code is gone")
    names = list(kernel.arg_names)
    constants = set(kernel.full_constexprs)
    signature = {
        name: str(types[name])
        for index, name in enumerate(names)
        if index not in constants and str(types[name]) != "constexpr"
    }
    if len(signature) != len(kernel.arg_tys):
        raise ValueError("a kernel's parameters")
    tuned = {*launcher.config.kwargs, "num_warps", "num_stages"}
    return TritonKernel(
        cubin=cubin,
        function=kernel.name,
        threads=kernel.num_warps * 32,
        shared=kernel.shared,
        names=tuple(name for name in names if name not in tuned),
        signature=signature,
        scratch_pointers=kernel.has_global_scratch + kernel.has_profile_scratch,
        grid={"inductor_meta": tuner.inductor_meta, "config": launcher.config},
    )
