"""Triton kernels: options, the processes that compile them, what was made of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def aot_cuda_options(compilers: int) -> dict[str, Any]:
    """What differs from `aot_options` for a static graph on CUDA.

    Its Triton kernels are compiled by so many processes at a time; see `start_triton_compilers`.
    """
    return {
        "compile_threads": compilers,
        "aot_inductor.embed_kernel_binary": True,
        "aot_inductor.emit_multi_arch_kernel": False,
        # Denormals and quotients as native has them.
        "eager_numerics.disable_ftz": True,
        "eager_numerics.division_rounding": True,
        "graph_partition": False,
        "pad_channels_last": False,
        "shape_padding": False,
        "triton.cudagraphs": False,
        "triton.multi_kernel": 0,
    }


# In the message where one of those processes failed.
OF_A_COMPILER = "SubprocException"


def start_triton_compilers(compilers: int) -> None:
    """Starts Inductor's processes that compile Triton kernels, if more than one is wanted.

    They need seconds, and no GPU; a kernel that is met before they are there is compiled here. They
    are of this process's group, are as nice as it is, and end with it.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    if compilers > 1:
        with config.patch(compile_threads=compilers):
            AsyncCompile.use_process_pool()


def stop_triton_compilers() -> None:
    """Ends those processes, where there are any; they hold hundreds of megabytes."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def use_cuda_headers(home: Path) -> None:
    """Makes Inductor take CUDA's headers from ``home``/include, whatever toolkit there is."""
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(home)


def cuda_options(*, together: bool = False) -> dict[str, Any]:
    """Options of one `compile_to_module` for a static kernel on CUDA.

    ``together`` lets Inductor do what depends on nothing of each other in as few launches as their
    arguments allow.
    """
    return {
        **(_in_few_launches() if together else {}),
        "comprehensive_padding": False,
        "compile_threads": 1,
        "cpp_wrapper": False,
        # Denormals and quotients as native has them.
        "eager_numerics.disable_ftz": True,
        "eager_numerics.division_rounding": True,
        "freezing": False,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "graph_partition": False,
        "keep_output_stride": True,
        "layout_optimization": False,
        "max_autotune": False,
        "pad_channels_last": False,
        "shape_padding": False,
        "triton.cudagraphs": False,
        "use_static_cuda_launcher": True,
    }


@functools.cache
def _in_few_launches() -> dict[str, Any]:
    """Options that combine kernels, and more than the eight of Inductor's own choice."""
    from torch._inductor import config
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    options: dict[str, Any] = {"combo_kernels": True, "combo_kernels_autotune": 0}
    if hasattr(config, "combo_kernel_max_num_nodes"):
        unlimited = {"combo_kernel_max_num_nodes": 1 << 20}
        return {**options, **unlimited, "combo_kernel_peak_memory_pct_threshold": None}
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(
        lambda scheduler: [list(nodes) for nodes in scheduler._topological_sort_nodes()]
    )
    return options


@contextlib.contextmanager
def rows_kept(longest: int) -> Iterator[None]:
    """While Inductor lowers: reductions over up to ``longest`` neighbours keep what they read."""
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    original = InductorChoices.should_use_persistent_reduction

    def should(features: Any, cooperative_reduction: bool) -> bool:
        row = features.reduction_numel
        if (
            config.triton.persistent_reductions
            and not cooperative_reduction
            and features.get_reduction_hint() == ReductionHint.INNER
            and getattr(row, "is_integer", False)
            and row.is_number
            and int(row) <= longest
        ):
            return True
        return bool(original(features, cooperative_reduction))

    InductorChoices.should_use_persistent_reduction = staticmethod(should)
    try:
        yield
    finally:
        InductorChoices.should_use_persistent_reduction = staticmethod(original)


def compile_to_module(
    graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> Any:
    """The Python module that Inductor generates for ``graph`` on CUDA, loaded.

    It has ``call``, and a tuner of Triton kernels under each kernel's name. None when nothing was
    generated.
    """
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    _keep_machine_code()
    made: list[Any] = []
    original = GraphLowering.compile_to_module

    def keep(lowering: Any) -> Any:
        made.append(original(lowering))
        return made[-1]

    GraphLowering.compile_to_module = keep
    try:
        compile_fx.compile_fx(graph, list(inputs), config_patches=options)
    finally:
        GraphLowering.compile_to_module = original
    return made[-1] if made else None


def generate_text(
    graph: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> str | None:
    """The text of the module that `compile_to_module` would load; nothing in it is compiled.

    None when nothing was generated, or what was needs more than its text.
    """
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []
    original = GraphLowering.compile_to_module

    class Generated(Exception):
        """Ends Inductor's work."""

    def keep(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        if not lowering.constants:
            texts.append(str(code.value))
        raise Generated

    GraphLowering.compile_to_module = keep
    try:
        compile_fx.compile_fx(graph, list(inputs), config_patches=options)
    except Exception:
        if not texts:
            raise
    finally:
        GraphLowering.compile_to_module = original
    return texts[-1] if texts else None


def load_module(text: str, options: dict[str, Any]) -> Any:
    """The module of a generated text, as `compile_to_module` loads one."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    _keep_machine_code()
    with config.patch(options):
        return PyCodeCache.load(text)


def skip_pattern_setup() -> None:
    """Keeps Inductor from tracing its library of patterns: seconds, and one node has none."""
    from torch._inductor.fx_passes import joint_graph

    joint_graph.lazy_init = lambda *_: None


@functools.cache
def _keep_machine_code() -> None:
    """Lets every launcher of a Triton kernel keep what it was made of."""
    from torch._inductor.runtime import triton_heuristics

    result = triton_heuristics.StaticTritonCompileResult
    original = result.make_launcher

    def make_launcher(self: Any) -> Any:
        kernel = self.kernel
        # A kernel whose source has been seen before comes back loaded, without its code.
        if kernel.cubin_raw is not None:
            kernel.eagercache_cubin = kernel.cubin_raw
        launcher = original(self)
        launcher.eagercache_parts = (
            kernel,
            getattr(kernel, "eagercache_cubin", None),
            self.compile_meta["signature"],
        )
        return launcher

    result.make_launcher = make_launcher


def tuned_kernels(module: Any) -> dict[str, tuple[Any, Any]]:
    """(tuner, chosen launcher) of every Triton kernel in a module of `compile_to_module`.

    The module must have run. ``launcher.eagercache_parts`` are Triton's kernel, its cubin, and the
    types of its parameters by name. Raises ValueError when one has not been tuned.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found = {}
    for name, tuner in vars(module).items():
        if isinstance(tuner, CachingAutotuner):
            if len(tuner.launchers) != 1:
                raise ValueError(f"{name} has {len(tuner.launchers)} launchers")
            found[name] = (tuner, tuner.launchers[0])
    return found


def triton_grid(meta: Any, numbers: Any) -> tuple[int, int, int]:
    """Blocks in each dimension. ``meta`` holds "inductor_meta" and the launcher's "config"."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    expression = GridExpr.from_meta(meta["inductor_meta"], meta["config"])
    x, y, z = expression.eval_slow({**meta["config"].kwargs, **numbers})
    return int(x), int(y), int(z)


def triton_grid_texts(meta: Any) -> tuple[list[str], tuple[str, str, str], dict[str, int]]:
    """Statements, the three numbers of blocks after them, and the numbers known of a tuning.

    Python's text over the names of the kernel's arguments and of those numbers.
    """
    from torch._inductor.runtime.triton_heuristics import GridExpr

    grid = GridExpr.from_meta(meta["inductor_meta"], meta["config"])
    blocks = str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)
    tuned = {name: v for name, v in meta["config"].kwargs.items() if type(v) is int}
    return list(grid.prefix), blocks, tuned
