"""A Python function's call, watched and made into one graph; in a worker.

The function runs first on made-up values, and everything that a kernel could not do is found there,
with the line: values that it reads, random numbers, writes to its arguments, output, changes of
what it refers to. Then it is traced: every operator that it calls becomes a node.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from eagercache.callables.function_gradient import tensors_of
from eagercache.callables.function_identity import identify_function
from eagercache.callables.function_operator import CustomOperator
from eagercache.callables.module_identity import Unfit
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.calls.call import Call, flatten_returns
from eagercache.calls.code_digest import code_digest
from eagercache.calls.numerics import same_bits
from eagercache.calls.samples import FILLS
from eagercache.calls.texts import named_line
from eagercache.worker.compat import symbolic_shapes
from eagercache.worker.graphs.indices import INDEXING, classes_of
from eagercache.worker.graphs.nodes import (
    behind,
    counts_from_the_storage,
    divides_integers,
    is_made_here,
    operator_name,
)
from eagercache.worker.inductor.call_graph import example_inputs
from eagercache.worker.inductor.commands import CompileRefused, FunctionRefused
from eagercache.worker.inductor.launch_plan import IndexRange
from eagercache.worker.modules.reads import Reads
from eagercache.worker.samples.draws import SEED

_SINGLE_VALUES = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})


def own_arguments(call: Call, values: Sequence[Any], name: str, operator: str) -> Any:
    """(args, kwargs) of the function itself, where ``name`` may be its backward operator."""
    args, kwargs = call.bind(values)
    return (args if name == operator else args[2:]), kwargs


def observe(operator: CustomOperator[Any, Any], call: Call) -> None:
    """Runs the function as ``call`` would.

    Raises FunctionRefused when no kernel can stand for it, CompileRefused when none can for this
    call.
    """
    if any(spec.wrapped for spec in call.tensors):
        raise CompileRefused("a number stands in a tensor's place")
    try:
        _observe(operator, call)
    except Unfit as error:
        function: Any = operator.function
        code, reason = function.__code__, str(error)
        if not reason.startswith("line "):  # found after a run, of the function as a whole
            reason = f"line {code.co_firstlineno} of {code.co_name}: {reason}"
        raise FunctionRefused(reason) from error


def _observe(operator: CustomOperator[Any, Any], call: Call) -> None:
    function: Any = operator.function
    before = identify_function(function).digest
    args, kwargs = _accepted_arguments(operator, call)
    inputs = tensors_of(args, kwargs)
    given = [tensor.clone() for tensor in inputs]
    watch = _Watch(operator.codes, inputs)
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        torch.no_grad(),
        FunctionRecorder() as recorder,
        watch,
    ):
        answer = function(*args, **kwargs)
    if output.getvalue() or errors.getvalue():
        raise Unfit("it prints")
    recorder.check_effects()
    for code, module in recorder.ran():
        if code_digest(code) not in operator.codes:
            raise Unfit(f"it runs {module}.{code.co_name}, which its code does not name")
    if any(not same_bits(a, b) for a, b in zip(given, inputs, strict=True)):
        raise Unfit("it writes to its arguments")
    with torch.no_grad(), Reads(inputs, gradients=None) as reads:
        function(*args, **kwargs)
    reads.check()
    if identify_function(function).digest != before:
        raise Unfit("it changes what it refers to outside of itself")
    _refuse_shared(answer, inputs)


def _accepted_arguments(operator: CustomOperator[Any, Any], call: Call) -> Any:
    """Arguments for which the function does not raise."""
    problem = ""
    for index, fill in enumerate(FILLS):
        values = call.sample(fill, SEED + index).values
        args, kwargs = own_arguments(call, values, str(call.name), operator.name)
        copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in args]
        try:
            with torch.no_grad():
                operator.function(*copies, **kwargs)
        except Exception as error:
            problem = named_line(error)
        else:
            return args, kwargs
    raise Unfit(f"it raises on made-up data: {problem}")


class _Watch(TorchDispatchMode):
    """Raises Unfit, with the function's line, where an operator does what no kernel can."""

    def __init__(self, codes: Iterable[str], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._codes = frozenset(codes)
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        problem = self._problem(func, args, kwargs or {})
        if problem:
            raise Unfit(f"{self._line()}: {problem}")
        return func(*args, **(kwargs or {}))

    def _problem(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        schema = func._schema
        if schema.name in _SINGLE_VALUES:
            return "it reads a tensor's value, which a kernel's code cannot branch on"
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(schema, args):
            return f"it draws random numbers ({schema.name})"
        if (
            torch.Tag.dynamic_output_shape in func.tags
            or torch.Tag.data_dependent_output in func.tags
        ) and schema.name != "aten::index":
            return f"the result's shape depends on values ({schema.name})"
        if not schema.name.startswith(("aten::", "prims::", "prim::")):
            return f"it calls the operator {schema.name}"
        for argument, value in [
            *zip(schema.arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
        ]:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and any(self._is_input(tensor) for tensor in _tensors_in(value)):
                return f"it writes to an argument ({schema.name}), which its schema does not say"
        return ""

    def _is_input(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def _line(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            if code_digest(frame.f_code) in self._codes:
                return f"line {frame.f_lineno} of {frame.f_code.co_name}"
            if frame.f_back is None:
                break
            frame = frame.f_back
        return "somewhere"


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, list) else []


def _drops_nothing(schema: Any, args: Sequence[Any]) -> bool:
    """Whether the only randomness is a dropout that is switched off."""
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.name in ("dropout_p", "dropout", "p"):
            return bool(value == 0)
        if argument.name in ("train", "training"):
            return value is False
    return schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu"


def _refuse_shared(answer: Any, inputs: Sequence[torch.Tensor]) -> None:
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for leaf in flatten_returns(answer):
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            raise Unfit(f"it returns a {type(leaf).__name__} that is no plain tensor")
        if vars(leaf):
            raise Unfit(f"it gives a tensor that it returns an attribute ({min(vars(leaf))})")
        pointer = leaf.untyped_storage().data_ptr()
        if pointer in memory:
            raise Unfit("what it returns shares memory with an argument or another output")
        memory.add(pointer)
        if leaf.storage_offset() != 0:
            raise Unfit("it returns a view into a larger tensor")


def trace(
    operator: CustomOperator[Any, Any],
    call: Call,
    symbolic: Sequence[torch.Tensor] = (),
    tied: Sequence[tuple[int, int]] = (),
) -> torch.fx.GraphModule:
    """The graph of what answers ``call``, a placeholder per tensor. Raises CompileRefused.

    ``symbolic`` are fake tensors of symbolic sizes to trace it with; ``tied`` are (tensor,
    dimension) pairs whose values follow the tensors' in `Call.bind`.
    """
    answer: Callable[..., Any] = operator.answer_of(call.name)

    def flat(*tensors: torch.Tensor) -> tuple[Any, ...]:
        sizes = [tensors[tensor].size(dimension) for tensor, dimension in tied]
        args, kwargs = call.bind([*tensors, *sizes])
        return tuple(flatten_returns(answer(*args, **kwargs)))

    try:
        with torch.no_grad(), enable_python_dispatcher() if symbolic else contextlib.nullcontext():
            mode = "real" if symbolic else "fake"
            graph = make_fx(flat, tracing_mode=mode)(*(symbolic or example_inputs(call)))
    except Exception as error:
        raise CompileRefused(f"it cannot be traced: {named_line(error)}") from error
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in _DIVIDING and divides_integers(node):
            raise CompileRefused(f"it divides integers by a tensor ({node.target})")
        if counts_from_the_storage(node):
            raise CompileRefused(f"it reads an argument's storage from its start ({node.target})")
    return graph


_DIVIDING = frozenset({"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"})


# Where an operator takes an index along one dimension: the positions of the tensor that is indexed,
# of the dimension, and of the index.
_ALONG_A_DIMENSION = {
    "aten::gather": (0, 1, 2),
    "aten::scatter": (0, 1, 2),
    "aten::scatter_add": (0, 1, 2),
    "aten::index_select": (0, 1, 2),
}
_OTHER_INDEXING = INDEXING | {"aten::embedding_dense_backward", "aten::index_put"}


def index_ranges(graph: torch.fx.Graph, call: Call) -> tuple[IndexRange, ...]:
    """What the inputs that are used as indices must hold.

    None at all where some index is neither an input nor made from none. Where the graph's sizes are
    symbolic, ranges are C++ text.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places = {node: number for number, node in enumerate(inputs)}
    bounds: dict[int, tuple[int | str, int | str]] = {}
    for node in graph.nodes:
        for index, low, high in _indices(node):
            if index is None:
                return ()
            source = behind(index)
            if source in places:
                found = _number(low), _number(high)
                both = _within_both(bounds.get(places[source], found), found)
                if both is None:
                    return ()
                bounds[places[source]] = both
            elif not is_made_here(index):
                return ()
    ranges = []
    for place, limits in bounds.items():
        if call.tensors[place].dtype not in (torch.int64, torch.int32):
            return ()
        value = inputs[place].meta["val"]
        sizes = tuple(map(_number, value.size()))
        strides = tuple(map(_number, value.stride()))
        dtype = str(value.dtype).removeprefix("torch.")
        ranges.append(IndexRange(place, dtype, sizes, strides, *limits))
    return tuple(ranges)


def fixed_bounds(ranges: Iterable[IndexRange]) -> dict[int, tuple[int, int]]:
    """(low, high) of indices by input, for ranges without symbolic sizes."""
    return {bounds.input: (int(bounds.low), int(bounds.high)) for bounds in ranges}


def _number(value: Any) -> int | str:
    return value if isinstance(value, int) else symbolic_shapes.size_text(value)


def _within_both(
    one: tuple[int | str, int | str], other: tuple[int | str, int | str]
) -> tuple[int | str, int | str] | None:
    """The range of what is in both; None where symbolic sizes do not tell."""
    if one == other:
        return one
    lows = [low for low, _ in (one, other) if isinstance(low, int)]
    highs = [high for _, high in (one, other) if isinstance(high, int)]
    return (max(lows), min(highs)) if len(lows) == len(highs) == 2 else None


def indexes_by_data(graph: torch.fx.Graph) -> bool:
    """Whether some index is not made by the graph itself out of nothing."""
    indices = [index for node in graph.nodes for index, _, _ in _indices(node)]
    return any(index is None or not is_made_here(index) for index in indices)


def _indices(node: torch.fx.Node) -> list[tuple[Any, Any, Any]]:
    """(index, low, high) of what a node indexes by; an index of None where that is not known.

    Bounds are numbers, or symbolic ones.
    """
    name = operator_name(node)
    args: Any = node.args
    if name in _ALONG_A_DIMENSION:
        tensor, dimension, index = (args[position] for position in _ALONG_A_DIMENSION[name])
        sizes = tensor.meta["val"].shape
        return [(index, 0, sizes[dimension] if sizes else 1)]
    if name == "aten::embedding":
        return [(args[1], 0, args[0].meta["val"].shape[0])]
    if name == "aten::embedding_dense_backward":
        return [(args[1], 0, _value(args[2]))]
    if name in ("aten::index", "aten::index_put"):
        sizes = args[0].meta["val"].shape
        pairs = list(zip(args[1], sizes, strict=False))
        if any(i is not None and i.meta["val"].dtype == torch.bool for i, _ in pairs):
            return [(None, 0, 0)]
        return [(index, -size, size) for index, size in pairs if index is not None]
    if labels := classes_of(node):
        return [(index, 0, classes) for index, classes, _ in labels]
    return [(None, 0, 0)] if name in _OTHER_INDEXING else []


def _value(argument: Any) -> Any:
    """A number among a node's arguments, which may be another node."""
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
