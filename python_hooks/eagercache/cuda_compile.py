"""One operator call made into CUDA machine code and a launch plan.

Inductor lowers the graph of one node to a Python module of Triton kernels; it is run once, which
lets Inductor tune them, and then taken apart. Neither g++ nor nvcc is run.
"""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _compat
from .calls import Call
from .commands import CompileFailed, CompileRefused, NoKernelOfItsOwn
from .compile import Lowered, build_graph, example_inputs, find_cause
from .cuda_plan import CudaPlan, TritonKernel, make_plan
from .cuda_text import WrapperText, read_wrapper
from .generated_text import GeneratedText
from .wrapper_text import NotUnderstood

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


def lower(call: Call, num_returns: int, graph: torch.fx.GraphModule | None = None) -> CudaLowered:
    """Inductor's and Triton's work on ``call``.

    ``graph`` stands in the place of the one of the operator alone. The state of the call must be
    applied, and the CUDA device usable. Raises CompileRefused
    (NoKernelOfItsOwn among them) or CompileFailed.
    """
    for spec in call.tensors:
        if not spec.aligned:
            raise CompileRefused("a tensor is not aligned as the kernels need it")
    begin = time.process_time()
    module, text, wrapper = _generate_understood(call, num_returns, graph)
    if _CHECKS.search(text):
        raise CompileRefused("generated code checks values")
    if wrapper.num_inputs != len(call.tensors):
        raise CompileRefused(
            f"the kernel takes {wrapper.num_inputs} tensors, the call has {len(call.tensors)}"
        )
    _tune(module, call)
    try:
        kernels = {name: _kernel(*pair) for name, pair in _compat.tuned_kernels(module).items()}
        plan = make_plan(wrapper, kernels)
    except NotUnderstood as error:
        raise CompileRefused(f"generated text not understood: {error}") from error
    except (ValueError, AttributeError, KeyError) as error:
        raise CompileRefused(f"generated kernels not understood: {error}") from error
    facts = GeneratedText(
        num_inputs=wrapper.num_inputs,
        num_outputs=len(wrapper.outputs),
        num_constants=0,
        kernels=tuple(call.kernel for call in wrapper.calls),
        extern_calls=(),
        uses_proxy_executor=False,
        checks_values=False,
        reduces=_REDUCES.search(text) is not None,
        approximates=_APPROXIMATES.search(text) is not None,
    )
    seconds = {"lower": round(time.process_time() - begin, 4)}
    return CudaLowered(Lowered(facts, None, None, "", seconds), plan)


def _generate_understood(
    call: Call, num_returns: int, given: torch.fx.GraphModule | None
) -> tuple[Any, str, WrapperText]:
    """Inductor's module for ``call``, its text, and what was read of it."""

    def graph() -> torch.fx.GraphModule:
        return build_graph(call, num_returns) if given is None else copy.deepcopy(given)

    # With reductions over rows and columns in one kernel, whose partial results eager operators
    # may have to add up; then, where that is so, each in a kernel of its own.
    for mixed_order in (True, False):
        module = _generate(call, graph(), _compat.cuda_options(mixed_order=mixed_order))
        text = Path(module.__file__).read_text()
        try:
            return module, text, read_wrapper(text)
        except NotUnderstood as error:
            if not mixed_order or _MIXED_ORDER.search(text) is None:
                raise _refusal(text, error) from error
    raise AssertionError("the loop's last round returns or raises")


def _refusal(text: str, error: NotUnderstood) -> CompileRefused:
    if "extern_kernels." in text or "torch.ops.aten." in _body(text):
        return NoKernelOfItsOwn("no kernel of its own")
    return CompileRefused(f"generated text not understood: {error}")


def _generate(call: Call, graph: torch.fx.GraphModule, options: dict[str, Any]) -> Any:
    _compat.skip_pattern_setup()
    try:
        with torch.no_grad():
            module = _compat.compile_to_module(
                _with_signed_zeros(graph),
                example_inputs(call),
                options,
            )
    except Exception as error:
        ours = find_cause(error)
        if ours is not None:
            raise ours from error
        transient = isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError))
        lines = str(error).splitlines() or ["no message"]
        raise CompileFailed(
            f"{type(error).__name__}: {lines[0][:200]}", transient=transient
        ) from error
    if module is None:
        raise CompileRefused("nothing was generated")
    return module


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


def _tune(module: Any, call: Call) -> None:
    """Runs the module on data of the call's, so that each kernel's configuration is chosen."""
    with torch.no_grad():
        module.call(list(example_inputs(call)))
    torch.cuda.synchronize()


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
