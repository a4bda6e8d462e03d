"""What the text that Inductor generated says about a kernel, and which texts are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagercache.calls.call import Call
from eagercache.worker.compat import aot_inductor
from eagercache.worker.inductor.commands import CompileRefused, NoKernelOfItsOwn


@dataclass(frozen=True)
class GeneratedText:
    """What the generated text says about a kernel."""

    num_inputs: int
    num_outputs: int
    num_constants: int
    kernels: tuple[str, ...]  # functions that Inductor generated
    extern_calls: tuple[str, ...]  # operators that it calls back into
    uses_proxy_executor: bool
    checks_values: bool
    reduces: bool  # some kernel accumulates over elements
    calls_functions: bool  # whose last bits depend on how they are made
    approximates: bool  # it does, or last bits depend on how roundings follow
    proxied: tuple[str, ...] = ()  # the operators that the proxy executor would call

    @property
    def proxy_reason(self) -> str:
        """Why a text that uses the proxy executor is refused."""
        names = f" for {', '.join(self.proxied)}" if self.proxied else ""
        return f"the generated code needs the proxy executor{names}"


# Functions of AOTInductor's C interface that are not operators.
_RUNTIME_CALL = re.compile(
    r"aoti_torch_(empty_strided\w*|create_tensor_from_blob\w*|delete\w*|get_\w+|new_\w+|clone\w*"
    r"|dtype_\w+|device_type_\w+|layout_\w+|memory_format_\w+|item_\w+|assign_tensors\w*|zero_"
    r"|check\w*|grad_mode_\w+|warn|_?reinterpret_tensor\w*|as_strided|copy_)$"
)
_PROXY_CALL = re.compile(r"\baoti_torch_(?:proxy_executor_call_function|call_dispatcher)\s*\(")
_ORIGIN = re.compile(r"// .*Original ATen: \[([^\]]*)\]")
_EXTERN_CALL = re.compile(r"\b(aoti_torch_\w+)\s*\(")
_KERNEL = re.compile(r'extern\s+"C"\s+(?:\w+\s+)*?void\s+(\w+)\s*\(')
_GPU_KERNEL = re.compile(r"\bkernels_\.(\w+) = loadKernel\(")
_ACCUMULATOR = re.compile(r"\btmp_acc\d")
# Vectors and single numbers have different ones, which differ in the last bit, and native may take
# the other.
_APPROXIMATION = re.compile(
    r"(?:\bstd::|\.|\bcalc_)(?:a?sin|a?cos|a?tan|a?sinh|a?cosh|a?tanh|atan2|exp|exp2|expm1|exp_u20"
    r"|fexp_u20|log|log2|log10|log1p|pow|erf|erfc|erfinv|lgamma|digamma|polygamma|i0|i0e|i1|i1e"
    r"|zeta|igammac?|hypot|sigmoid)\("
)
_STEP = re.compile(r"\btmp\d+ [-+*/] tmp\d+\b|\bfma\(|\bfmadd\(")
_BODY = re.compile(r"\bC10_(?:UN)?LIKELY\(|\bfor\s*\(")
_GIVEN = re.compile(r"\boutput_handles\[\d+\] = (\w+)\.release\(\)")
_VALUE_CHECK = re.compile(r"\b(AOTI_TORCH_CHECK|TORCH_CHECK\w*|AOTI_RUNTIME_CHECK)\s*\(")


def read_generated_text(wrapper: str, kernel: str) -> GeneratedText:
    """Facts of the two generated files. Raises CompileRefused when they are not understood."""
    try:
        num_inputs, num_outputs, num_constants = aot_inductor.graph_fields(wrapper)
        body = wrapper[wrapper.index("::run_impl(") :]
    except ValueError as error:
        raise CompileRefused(f"generated text not understood: {error}") from error
    given = _GIVEN.findall(body)
    if len(set(given)) < len(given):  # the second is given an empty handle
        raise CompileRefused("it returns one tensor twice")
    functions = _APPROXIMATION.search(kernel) is not None
    calls = sorted({name for name in _EXTERN_CALL.findall(body) if not _RUNTIME_CALL.match(name)})
    proxy = [name for name in calls if "proxy_executor" in name or "call_dispatcher" in name]
    return GeneratedText(
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_constants=num_constants,
        kernels=(*_KERNEL.findall(kernel), *_GPU_KERNEL.findall(wrapper)),
        extern_calls=tuple(name for name in calls if name not in proxy),
        uses_proxy_executor=bool(proxy),
        checks_values=_VALUE_CHECK.search(kernel) is not None
        or _VALUE_CHECK.search(body) is not None,
        reduces=_ACCUMULATOR.search(kernel) is not None,
        calls_functions=functions,
        approximates=functions or _rounds_twice(kernel),
        proxied=_proxied(body),
    )


def _proxied(body: str) -> tuple[str, ...]:
    """What the comments above calls of the proxy executor name last, behind what is fused."""
    origins = [_ORIGIN.findall(body[: call.start()])[-1:] for call in _PROXY_CALL.finditer(body)]
    names = (found.rpartition(", ")[2] for above in origins for found in above)
    return tuple(dict.fromkeys(filter(None, names)))


def _rounds_twice(kernel: str) -> bool:
    """Whether a number may be rounded more than once: native may contract other steps than we."""
    return any(len(_STEP.findall(body)) > 1 for body in _BODY.split(kernel))


def admit(text: GeneratedText, call: Call, *, checked: bool = False) -> None:
    """Raises CompileRefused (NoKernelOfItsOwn among them) for a text that is no kernel for us.

    ``checked``: the values that the text checks are checked before the kernel runs.
    """
    if not text.kernels:
        if text.extern_calls or text.uses_proxy_executor:
            raise NoKernelOfItsOwn("no kernel of its own")
        raise CompileRefused("nothing was generated: the result is made without a kernel")
    if text.uses_proxy_executor:
        raise CompileRefused("the generated code needs the proxy executor")
    if text.num_constants:
        raise CompileRefused("the generated code holds constants")
    if text.checks_values and not checked:
        raise CompileRefused("generated code checks values")
    if text.num_inputs != len(call.tensors):
        raise CompileRefused(
            f"the kernel takes {text.num_inputs} tensors, the call has {len(call.tensors)}"
        )
