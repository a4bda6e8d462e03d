"""AOTInductor on CPU: its options, its compiles, its generated text."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from eagercache.base.toolchain import Isa


def set_vector_isa(isa: Isa) -> None:
    """Makes Inductor generate code for ``isa`` without asking the compiler what it can do."""
    from torch._inductor import cpu_vec_isa

    bases = {"avx512": cpu_vec_isa.VecAVX512, "avx2": cpu_vec_isa.VecAVX2}
    base = bases.get(isa.name)
    if base is None:
        cpu_vec_isa.valid_vec_isa_list = lambda: []
        return

    # __bool__ is where the probing happens; a subclass has its own cache of the answer.
    fixed = type(
        f"Fixed{base.__name__}", (base,), {"__bool__": lambda self: True, "__hash__": base.__hash__}
    )
    instance = fixed()
    cpu_vec_isa.valid_vec_isa_list = lambda: [instance]


def set_command_runner(runner: Callable[[str, str], None]) -> None:
    """Routes every compiler run of Inductor to ``runner(command_line, working_directory)``.

    The runner raises when the command fails; whatever it raises leaves `aot_compile`, perhaps as
    the cause of another exception.
    """
    from torch._inductor import cpp_builder

    cpp_builder.run_compile_cmd = lambda cmd_line, cwd: runner(cmd_line, cwd)


def set_text_handler(handler: Callable[[str, str], str | tuple[str, str] | None]) -> None:
    """Shows ``handler`` the text (wrapper, kernels) of every AOTInductor compile.

    A string that it returns is what `aot_compile` returns, and nothing is compiled. With None the
    compile goes on, with two strings it goes on with those texts. What it raises leaves
    `aot_compile`, perhaps as the cause of another exception.
    """
    from torch._inductor import codecache

    original = _aot_code_compile()

    def compile_code(
        graph: Any, wrapper_code: str, kernel_code: str, *rest: Any, **keywords: Any
    ) -> Any:
        taken = handler(wrapper_code, kernel_code)
        if isinstance(taken, str):
            return taken
        return original(graph, *(taken or (wrapper_code, kernel_code)), *rest, **keywords)

    codecache.AotCodeCompiler.compile = staticmethod(compile_code)


def proxied_operators() -> list[str]:
    """In a text handler: what the text calls by the proxy executor, by number; "space::name"."""
    from torch._inductor.virtualized import V

    return [str(extern.node.target).removesuffix(".default") for extern in V.extern_kernel_nodes]


_UNCHECKED = re.compile(
    r"aoti_torch_(proxy_executor_call_function|\w*(scatter|index_put)\w*_out)\("
)


def checked_calls(wrapper: str) -> str:
    """The wrapper's text, where what fails in the proxy executor fails.

    And in native's writes by an index (`scatter_add_`, `index_put_`). Before 2.15 nobody looks at
    what these calls return.
    """
    lines = wrapper.split("\n")
    for number, line in enumerate(lines):
        if _UNCHECKED.match(line.strip()):
            if not line.endswith(");"):
                raise ValueError("a call of native's is not one line")
            lines[number] = f"AOTI_TORCH_ERROR_CODE_CHECK({line.strip().removesuffix(';')});"
    return "\n".join(lines)


@functools.cache
def _aot_code_compile() -> Callable[..., Any]:
    """AotCodeCompiler's own method, before any handler is put in its place."""
    from torch._inductor import codecache

    return codecache.AotCodeCompiler.compile


def kernel_compile_command(compiler: str) -> list[str]:
    """Inductor's command for generated kernels, less source, target and ``-c``.

    For the instruction set that `set_vector_isa` set.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    with config.patch(aot_options(Path(), compiler, 1)):
        options = cpp_builder.CppTorchDeviceOptions(
            vec_isa=cpu_vec_isa.pick_vec_isa(),
            device_type="cpu",
            aot_mode=True,
            compile_only=True,
        )
        builder = cpp_builder.CppBuilder(name="target", sources="source.cpp", BuildOption=options)
        words = shlex.split(builder.get_command_line())
    drop = {"source.cpp", "-c", "-o", builder.get_target_file_path()}
    return [word for word in words if word not in drop]


def container_interface() -> Path:
    """The file whose text Inductor puts into the wrapper of every container."""
    from torch._inductor.codegen import cpp_wrapper_cpu

    return Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"


def aot_options(output: Path, compiler: str, num_threads: int) -> dict[str, Any]:
    """Options of one `aot_compile` for a static kernel on CPU.

    Multiplications and additions are contracted, as where PyTorch itself was built: of 116 calls
    that were tried, 8 more pass the proof for it (tanh_backward, addcmul, lerp, group norm), and
    none fewer.
    """
    return {
        "aot_inductor.output_path": f"{output}/",
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O1",
        "aot_inductor.debug_compile": False,
        "aot_inductor.debug_symbols": False,
        "aot_inductor.package": False,
        "compile_threads": 1,
        "comprehensive_padding": False,
        "cpp.cxx": (compiler,),
        "cpp.dynamic_threads": False,
        "cpp.enable_floating_point_contract_flag": "fast",
        "cpp.enable_kernel_profile": False,
        "cpp.simdlen": None,
        "cpp.threads": num_threads,
        "cpp.weight_prepack": False,
        "freezing": False,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "keep_output_stride": True,
        "layout_optimization": False,
        "max_autotune": False,
    }


def aot_graph_options(*, draws: bool = False, of_training: bool = False) -> dict[str, Any]:
    """What differs from `aot_options` for a graph of several operators.

    Convolutions and what stands between them may keep their tensors in channels_last; the graph's
    own outputs have the strides of the forward all the same (`keep_output_stride`). What ``draws``
    random numbers calls native's operators for them, in the order of the graph's values.

    Half of a call ``of_training`` is lowered in the order that the partition gave it. Inductor
    takes what AOTInductor is given for inference, where it moves each operator to the first that
    reads it: those of weights' gradients, which nothing reads, to the end of a backward, until
    which all that they need is kept.
    """
    return {
        "layout_optimization": True,
        "fallback_random": draws,
        "reorder_for_locality": not of_training,
    }


def aot_compile(
    graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> str:
    """Path of the shared object that AOTInductor makes of ``graph``."""
    import torch._inductor

    result = torch._inductor.aot_compile(graph, inputs, options=options)
    if not isinstance(result, str):
        raise TypeError(f"AOTInductor returned {type(result).__name__}, not a path")
    return result


@contextlib.contextmanager
def max_pool_gradients_by_native() -> Iterator[None]:
    """Graphs that are compiled in the block call native for the gradients of max pools.

    Inductor's compares, for each element, its index with those of all windows around it: twenty
    times as long as native's on CPU, which adds each window's gradient to the one element. From
    2.12 on there is nothing to do: it makes a scatter of them, a call of native's, too.
    """
    import torch
    from torch._inductor import lowering

    table: dict[Any, Any] = lowering.lowerings
    operator = torch.ops.aten.max_pool2d_with_indices_backward.default
    kept = table[operator]
    table[operator] = lowering.fallback_max_pool2d_with_indices_backward
    try:
        yield
    finally:
        table[operator] = kept


def prepare_inductor() -> None:
    """Imports what a compile needs, so that the first one is not slower than the others by that."""
    import torch._inductor
    import torch._inductor.codecache
    import torch._inductor.compile_fx
    import torch._inductor.config

    # The pool of compile processes would start with the first graph; one graph at a time needs
    # none.
    torch._inductor.config.compile_threads = 1
    _take_constants(torch._inductor.compile_fx)


def _take_constants(compile_fx: Any) -> None:
    """Has Inductor take graphs that are traced down to their operators with constants in them.

    It looks for constants that are no inputs (`torch.tensor(2.0)` in a forward) before it traces
    a graph, not after that, and stops at them.
    """
    propagate = compile_fx.fake_tensor_prop
    if getattr(propagate, "takes_constants", False):
        return

    @functools.wraps(propagate)
    def propagate_constants(graph: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return propagate(graph, inputs, force_allow_non_fake_inputs=True)

    propagate_constants.takes_constants = True  # type: ignore[attr-defined]
    compile_fx.fake_tensor_prop = propagate_constants


def graph_fields(wrapper: str) -> tuple[int, int, int]:
    """Inputs, outputs and constants of a generated AOTInductor wrapper's text.

    Raises ValueError when the text does not look as expected.
    """
    found = re.search(r":\s*AOTInductorModelBase\(\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,", wrapper)
    if found is None:
        raise ValueError("the generated text has no AOTInductorModelBase constructor")
    return int(found[1]), int(found[2]), int(found[3])
