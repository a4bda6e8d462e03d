"""Makes Inductor and Triton believe in an H200, so that CUDA code is generated without a GPU.

For a process of its own: it replaces functions of torch. Tensors are fake; nothing can run.
"""

from __future__ import annotations

import functools
import re
import struct
import types
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=139 << 30,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    L2_cache_size=60 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)


class _Driver:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def install() -> None:
    """Replaces what asks for a device."""
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._dynamo.device_interface import CudaInterface
    from triton.runtime import driver

    cuda: Any = torch.cuda
    for name, value in {
        "_exchange_device": 0,
        "_lazy_init": None,
        "_maybe_exchange_device": 0,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": _PROPERTIES,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "is_available": True,
        "is_current_stream_capturing": False,
        "set_device": None,
        "set_rng_state": None,
        "synchronize": None,
    }.items():
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    interface: Any = CudaInterface
    interface.is_available = staticmethod(lambda: True)
    interface.get_device_properties = staticmethod(lambda *_: _PROPERTIES)
    interface.get_compute_capability = staticmethod(lambda *_: 90)
    interface.Worker.get_device_properties = staticmethod(lambda *_: _PROPERTIES)
    interface.Worker.current_device = staticmethod(lambda: 0)
    fake: Any = fake_tensor
    fake.init_gpu_context = lambda *_: None
    driver.set_active(_Driver())
    from torch._inductor.runtime import triton_helpers

    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None
    # Operators on fake tensors switch devices; this puts a switch there that does nothing.
    torch._C._ensureCUDADeviceGuardSet()


def install_for_containers() -> None:
    """`install`, and what AOTInductor does beyond: kernels get their first configuration."""
    install()
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.compiler import CompiledKernel

    handles = {"function": 0, "module": 0, "n_max_threads": 1024, "n_regs": 0, "n_spills": 0}
    kernel: Any = CompiledKernel
    kernel._init_handles = lambda self: vars(self).update(handles, _run=lambda *_: None)
    tuner: Any = CachingAutotuner
    tuner.precompile = lambda *_, **__: None
    patterns: Any = joint_graph
    patterns.lazy_init = lambda *_: None

    def tune(wrapper: Any) -> None:
        wrapper.kernel_autotune_defs.splice("async_compile.wait(globals())")
        scope: dict[str, Any] = {}
        exec(wrapper.kernel_autotune_defs.getvalue(), scope)
        for value in list(scope.values()):
            if isinstance(value, CachingAutotuner):
                result = value._precompile_config(value.configs[0])
                value.save_gpu_kernel(0, result.make_launcher())

    generator: Any = PythonWrapperCodegen
    generator.generate_and_run_autotune_block = tune


def compile_container(folder: str) -> dict[str, Any]:
    """Compiles a small module for an H200; its file, and what is known of its text."""
    install_for_containers()
    from eagercache.base.toolchain import AVX2, find_compiler
    from eagercache.worker.inductor.compile import Tools
    from eagercache.worker.inductor.generated_text import GeneratedText
    from zoos import module_zoo

    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        module = module_zoo.Block().eval()
        x = torch.empty(4, 48)
    program = torch.export.export(module, (x,), strict=True)
    inputs = [
        program.state_dict[spec.target] if spec.target else x
        for spec in program.graph_signature.input_specs
    ]
    texts: list[GeneratedText] = []
    private, build = Path(folder, "private"), Path(folder, "build")
    private.mkdir()
    build.mkdir()
    tools = Tools(find_compiler(), AVX2, private)
    graph = torch.fx.GraphModule(program.graph_module, program.graph)
    path = tools.container(graph, tuple(inputs), build, texts.append)
    return {
        "path": str(path),
        "text": vars(texts[0]),
        "seconds": tools.commands.seconds,
        "call": _contain_call(tools, Path(folder, "call")),
    }


def _contain_call(tools: Any, folder: Path) -> dict[str, Any]:
    """The container of one operator's call whose text no launch plan can be made of."""
    from eagercache.calls.call import Call
    from eagercache.worker.cuda import compile as cuda_compile
    from eagercache.worker.inductor.wrapper_statements import NotUnderstood

    overload, arguments, returns = _CALLS["aten::native_layer_norm"]
    description = {"op": "aten::native_layer_norm", "overload": overload, "state": _STATE}
    call = Call({**description, "args": arguments})
    changed: Any = cuda_compile
    changed.example_inputs = functools.partial(_examples, FakeTensorMode())
    folder.mkdir()

    def not_understood(_: str) -> Any:
        raise NotUnderstood("a planted statement")

    changed.read_wrapper = not_understood
    try:
        cuda_compile.lower(call, returns)
    except cuda_compile.PlanUnknown as unknown:
        made = cuda_compile.contain(call, returns, None, tools, folder, unknown, "0" * 64)
    return {"path": str(made.container), "why": made.why_container, "text": vars(made.text)}


def write_drawing_attention(folder: str) -> dict[str, Any]:
    """What a forward draws whose attention drops weights on a GPU, and what its text calls."""
    install_for_containers()
    from eagercache.base.toolchain import AVX2, find_compiler
    from eagercache.worker.compat import aot_inductor
    from eagercache.worker.compat import triton_kernels as _triton
    from eagercache.worker.graphs.dropout_masks import drawn_within
    from eagercache.worker.inductor.compile import Tools
    from eagercache.worker.inductor.text_takers import TextReader
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn import functional

    def attend(x: torch.Tensor, into: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.1)
        heads = (x @ into).view(4, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
        drawing = torch.ops.aten._scaled_dot_product_cudnn_attention
        attended = drawing(*heads.unbind(0), bias, True, 0.1, False, False, scale=0.125)[0]
        return functional.dropout(attended.transpose(1, 2).reshape(x.shape), 0.2) + x

    def layers(*given: torch.Tensor) -> list[torch.Tensor]:
        return [attend(attend(*given), *given[1:])]

    sizes = ([4, 128, 256], [256, 768], [4, 1, 1, 128])
    private, build = Path(folder, "private"), Path(folder, "build")
    private.mkdir()
    build.mkdir()
    tools = Tools(find_compiler(), AVX2, private)
    options = aot_inductor.aot_options(build, tools.commands.compiler.path, 1)
    options.update(aot_inductor.aot_graph_options(draws=True), **_triton.aot_cuda_options(1))
    texts: list[str] = []
    reader = TextReader(lambda wrapper, _: texts.append(wrapper))
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        given[2] = given[2].expand(4, 4, 128, 128)
        graph = make_fx(layers, _allow_non_fake_inputs=True)(*given)
        tools._compile(graph, tuple(given), options, build, reader, for_gpu=True)
    calls = re.findall(r"aoti_torch_cuda_(native_dropout|\w+_attention)\(", texts[0])
    return {"draws": [type(draw).__name__ for draw in drawn_within(graph.graph)], "calls": calls}


def compile_first_configurations(module: Any) -> dict[str, tuple[Any, Any]]:
    """What `tuned_kernels` gives where there is a GPU, of each kernel's first tuning."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found = {}
    for name, tuner in vars(module).items():
        if isinstance(tuner, CachingAutotuner):
            config = tuner.configs[0]
            result = tuner._precompile_config(config)
            parts = (result.kernel, result.kernel.cubin_raw, result.compile_meta["signature"])
            found[name] = (tuner, types.SimpleNamespace(config=config, eagercache_parts=parts))
    return found


def _tensor(sizes: list[int], dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    strides = [int(torch.tensor(sizes[i + 1 :]).prod()) for i in range(len(sizes))]
    return {"kind": "tensor", "dtype": dtype, "device": "cuda:0", "sizes": sizes,
            "strides": strides, "wrapped": False, "aligned": True, **changes}  # fmt: skip


_NUMBER = _tensor([], "float64", device="cpu", wrapped=True)
_HALF = "3fe0000000000000"
_PARAMETERS = {"kind": "tensor_list", "elements": [_tensor([24, 8]), _tensor([24])] * 70}
_CALLS: dict[str, tuple[str, list[dict[str, Any]], int]] = {
    "aten::mul": ("Tensor", [_tensor([64, 512]), _NUMBER], 1),
    "aten::sum": (
        "dim_IntList",
        [
            _tensor([4, 2_000_000]),
            {"kind": "int_list", "values": [1]},
            {"kind": "bool", "value": False},
            {"kind": "none"},
        ],
        1,
    ),
    "aten::native_layer_norm": (
        "",
        [
            _tensor([64, 512], "bfloat16"),
            {"kind": "int_list", "values": [512]},
            _tensor([512], "bfloat16"),
            _tensor([512], "bfloat16"),
            {"kind": "float", "bits": "3ee4f8b588e368f1"},
        ],
        3,
    ),
    # Inductor reduces rows and columns of it in one kernel, and has eager ones add the parts up.
    "aten::native_layer_norm_backward": (
        "",
        [
            _tensor([32, 256, 768]),
            _tensor([32, 256, 768]),
            {"kind": "int_list", "values": [768]},
            _tensor([32, 256, 1]),
            _tensor([32, 256, 1]),
            _tensor([768]),
            _tensor([768]),
            {"kind": "bool_list", "values": [True, True, True]},
        ],
        3,
    ),
    "aten::mm": ("", [_tensor([64, 512]), _tensor([512, 64])], 1),
    "aten::abs": ("", [_tensor([64], aligned=False)], 1),
    # Of an optimizer: matrices and vectors by turns.
    "aten::_foreach_mul_": ("Scalar", [_PARAMETERS, {"kind": "float", "bits": _HALF}], 0),
}
_STATE = {
    "default_dtype": "float32",
    "deterministic": False,
    "deterministic_warn_only": False,
    "fill_uninitialized_memory": True,
    "num_threads": 1,
}


def _examples(mode: FakeTensorMode, call: Any) -> tuple[torch.Tensor, ...]:
    with mode:
        return tuple(
            torch.empty_strided(s.sizes, s.strides, dtype=s.dtype, device=s.device)
            for s in call.tensors
        )


def _example_rows(mode: FakeTensorMode, sizes: tuple[int, ...]) -> torch.Tensor:
    with mode:
        return torch.empty(sizes, device="cuda:0")


def _take_first_configurations(mode: FakeTensorMode) -> None:
    """Lets calls be lowered on fake tensors, and kernels be what is tried first."""
    from eagercache.worker.compat import triton_kernels as _triton
    from eagercache.worker.cuda import compile as cuda_compile
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    changed: Any = cuda_compile
    changed.example_inputs = functools.partial(_examples, mode)
    changed._tune = lambda *_: None
    triton_kernels: Any = _triton
    triton_kernels.tuned_kernels = compile_first_configurations
    tuner: Any = CachingAutotuner
    tuner.precompile = lambda *_, **__: None


def compile_some() -> dict[str, Any]:
    """The plans of some calls, or why there is none, and whether each holds machine code."""
    install()
    from eagercache.calls.call import Call
    from eagercache.worker.cuda import compile as cuda_compile
    from eagercache.worker.cuda import final_reductions

    mode = FakeTensorMode()
    _take_first_configurations(mode)
    reductions: Any = final_reductions
    reductions.example_rows = functools.partial(_example_rows, mode)
    result: dict[str, Any] = {"machine_code": True}
    for name, (overload, arguments, returns) in _CALLS.items():
        call = Call({"op": name, "overload": overload, "state": _STATE, "args": arguments})
        try:
            plan = cuda_compile.lower(call, returns).plan
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
            continue
        result[name] = plan.to_json()
        result["machine_code"] &= all(c.startswith(b"\x7fELF") for c in plan.cubins())
    return result


# Overload, arguments, (tensor, dimension) of the open sizes, how many tensors are returned.
_OPEN_CALLS: dict[str, tuple[str, list[dict[str, Any]], list[tuple[int, int]], int]] = {
    "aten::tanh": ("", [_tensor([64, 96], "bfloat16")], [(0, 0), (0, 1)], 1),
    "aten::native_layer_norm": (
        "",
        [
            _tensor([4, 100, 768], "bfloat16"),
            {"kind": "int_list", "values": [768]},
            _tensor([768], "bfloat16"),
            _tensor([768], "bfloat16"),
            {"kind": "float", "bits": "3ee4f8b588e368f1"},
        ],
        [(0, 1)],
        3,
    ),
    "aten::add": (
        "Tensor",
        [_tensor([4, 100, 64]), _tensor([100, 64]), {"kind": "int", "value": 1}],
        [(0, 1), (1, 0)],
        1,
    ),
    "aten::_softmax": (
        "",
        [
            _tensor([4, 8, 100, 100]),
            {"kind": "int", "value": -1},
            {"kind": "bool", "value": False},
        ],
        [(0, 2), (0, 3)],
        1,
    ),
    "aten::sum": (
        "dim_IntList",
        [
            _tensor([4000, 640]),
            {"kind": "int_list", "values": [0]},
            {"kind": "bool", "value": False},
            {"kind": "none"},
        ],
        [(0, 0)],
        1,
    ),
    "aten::mul": ("Tensor", [_tensor([64, 56]), _NUMBER], [(0, 0)], 1),
    "aten::mm": ("", [_tensor([64, 512]), _tensor([512, 64])], [(0, 0)], 1),
}


def _open_fakes(call: Any, symbols: list[tuple[int, int]]) -> tuple[list[torch.Tensor], Any]:
    """What `symbolic_tensors` gives where there is a GPU."""
    from eagercache.worker.compat import symbolic_shapes

    tensors = [
        torch.empty_strided(
            s.sizes, s.strides, dtype=s.dtype, device="cpu" if s.device == "cpu" else "meta"
        )
        for s in call.tensors
    ]
    sized, environment = symbolic_shapes.symbolic_tensors(tensors, frozenset(symbols))
    mode: Any = getattr(sized[0], "fake_mode")  # noqa: B009
    with mode:
        fakes = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda:0")
            if t.device.type == "meta"
            else t
            for t in sized
        ]
    return fakes, environment


def compile_open() -> dict[str, Any]:
    """The plans of some calls with open sizes, or why there is none, and numbers of each."""
    install()
    from eagercache.worker.compat import symbolic_shapes
    from eagercache.worker.cuda import compile as cuda_compile
    from eagercache.worker.inductor.call_graph import build_graph
    from eagercache.worker.inductor.shape_plan import Symbols
    from eagercache.worker.samples.shape_class import ShapeFamily

    _take_first_configurations(FakeTensorMode())
    result: dict[str, Any] = {}
    for name, (overload, arguments, symbols, returns) in _OPEN_CALLS.items():
        pattern = {"symbols": [[0, t, d] for t, d in symbols], "ties": [], "words": []}
        description = {"op": name, "overload": overload, "state": _STATE, "args": arguments}
        family = ShapeFamily({**description, "pattern": pattern})
        fakes, environment = _open_fakes(family.call, symbols)
        sizes = tuple(tuple(symbolic_shapes.size_text(n) for n in fake.size()) for fake in fakes)
        names = tuple(sizes[tensor][dimension] for tensor, dimension in symbols)

        def assumed(names: Any = names, sizes: Any = sizes, known: Any = environment) -> Symbols:
            return Symbols(names, sizes, tuple(symbolic_shapes.assumptions(known, names)))

        mode: Any = getattr(fakes[0], "fake_mode")  # noqa: B009
        try:
            with mode:
                graph = build_graph(family.symbolic(), returns, family.tied_sizes)
            _, plan = cuda_compile.lower_open(family.call, returns, graph, fakes, assumed, pattern)
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
            continue
        result[name] = plan.to_json([(1, True)])
    return result


def _list_of(count: int, dtype: str = "float32") -> dict[str, Any]:
    return {"kind": "tensor_list", "elements": [_tensor([24, 8], dtype), _tensor([7])] * count}


def _float(number: float) -> dict[str, Any]:
    return {"kind": "float", "bits": struct.pack(">d", number).hex()}


_RATES = {"kind": "scalar_list", "elements": [_float(-0.001 - n / 7_000) for n in range(6)]}
# Overload, arguments, how many tensors are returned.
_SCALAR_CALLS: dict[str, tuple[str, list[dict[str, Any]], int]] = {
    "aten::add": ("Tensor", [_tensor([64, 8]), _tensor([64, 8]), _float(0.01)], 1),
    "aten::div_": ("Scalar", [_tensor([64, 8], "bfloat16"), _float(0.97)], 1),
    "aten::_foreach_div_": ("ScalarList", [_list_of(3), _RATES], 0),
    "aten::addcdiv_": ("", [_tensor([300], "float64")] * 3 + [_float(-0.01)], 1),
    "aten::_foreach_add_": ("List", [_list_of(40), _list_of(40), _float(-0.01)], 0),
    "aten::_foreach_addcdiv_": ("ScalarList", [_list_of(3)] * 3 + [_RATES], 0),
    "aten::mm": ("", [_tensor([64, 512]), _tensor([512, 64])], 1),
}


def compile_scalars() -> dict[str, Any]:
    """The plans of some calls that take numbers, or why there is none."""
    install()
    from eagercache.worker.cuda import compile as cuda_compile
    from eagercache.worker.inductor.call_graph import build_graph
    from eagercache.worker.samples.scalar_class import ScalarFamily

    _take_first_configurations(FakeTensorMode())
    result: dict[str, Any] = {}
    for name, (overload, arguments, returns) in _SCALAR_CALLS.items():
        other = [_other(argument) for argument in arguments]
        own = {"op": name, "overload": overload, "state": _STATE, "args": arguments}
        try:
            family = ScalarFamily({**own, "class_args": other})
            marks = family.marks(0), family.marks(1)
            made = cuda_compile.lower_scalars(
                family.call,
                returns,
                lambda numbers, of=family, n=returns: build_graph(of.member(numbers), n),
                marks,
            )
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
            continue
        result[name] = made[1].to_json()
    return result


def _other(argument: dict[str, Any]) -> dict[str, Any]:
    """An argument of a call's scalar class."""
    if argument["kind"] == "scalar_list":
        return {**argument, "elements": [_other(each) for each in argument["elements"]]}
    return _float(2.0) if argument["kind"] == "float" else argument
