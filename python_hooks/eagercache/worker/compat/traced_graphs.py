"""Graphs of calls with their gradients, traced and split."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from eagercache.worker.compat.noted_calls import before

if TYPE_CHECKING:
    import torch


def export_constants_of_objects() -> None:
    """Lets `torch.export` return a number that is read from an object, as it returns others.

    It asks for `is_input` of where such a number comes from, which only sources of arguments have.
    Newer torch asks with a default.
    """
    from torch._guards import Source

    if not hasattr(Source, "is_input"):
        Source.is_input = False


def takes_recurrent_layers() -> contextlib.AbstractContextManager[None]:
    """A block in which TorchDynamo traces `nn.RNN`, `nn.LSTM` and `nn.GRU`.

    It refuses them for the lists of weights that they keep, and look through at each call. Here
    the identity of a module has these lists, and they are watched.
    """
    from torch._dynamo import config

    made: contextlib.AbstractContextManager[None] = config.patch(allow_rnn=True)
    return made


@contextlib.contextmanager
def _unrolls_recurrent_layers(gradients: bool) -> Iterator[None]:
    """A block in which an LSTM with ``gradients`` is decomposed whole.

    torch decomposes it into oneDNN's layer where its input needs none, though its weights may, and
    generated code cannot call the gradient of that.
    """
    from torch._decomp import decompositions

    name = "select_one_layer_lstm_function"
    original = getattr(decompositions, name, None)
    if original is None or not gradients:
        yield
        return
    with _replaced(decompositions, name, lambda *_: decompositions.one_layer_lstm):
        yield


def mend_final_states() -> None:
    """Lets a decomposed LSTM return its last states in their own shape.

    torch leaves a dimension too many in them, unless the batch is one row.
    """
    from torch._decomp import decompositions

    original = getattr(decompositions, "one_layer_lstm", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def one_layer(inp: Any, hidden: Any, *given: Any, **named: Any) -> Any:
        out, states = original(inp, hidden, *given, **named)
        pairs = zip(states, hidden, strict=True)
        return out, tuple(state.reshape(first.shape) for state, first in pairs)

    decompositions.one_layer_lstm = one_layer


@contextlib.contextmanager
def data_as_detached() -> Iterator[None]:
    """A block in which a tensor's `data` is traced as `detach()`.

    Both are the same memory without gradients; they differ in whose version a write moves, which
    the watched call tells. An exported program takes `data` for a constant of its own.
    """
    from torch._dynamo.variables import TensorVariable

    def method_attr_data(self: Any, tx: Any) -> Any:
        return self.call_method(tx, "detach", [], {})

    with _replaced(TensorVariable, "method_attr_data", method_attr_data):
        yield


@contextlib.contextmanager
def noted_custom_gradients() -> Iterator[list[bool]]:
    """A block; the list is not empty once a `torch.autograd.Function` was traced with gradients on.

    Of such a function an exported program has the forward alone, in a block without gradients: one
    that the forward wrote itself (`torch.no_grad`) looks the same. Of one that is given nothing
    that needs a gradient it has the forward without such a block: a weight that the function reads
    by itself would get a gradient.
    """
    import torch
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    met: list[bool] = []

    def note(*_: Any, **__: Any) -> None:
        if torch.is_grad_enabled():
            met.append(True)

    with contextlib.ExitStack() as undo:
        before(undo, AutogradFunctionVariable, "call_apply", note)
        yield met


def joint_graph(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    *,
    gradients: bool = True,
) -> torch.fx.GraphModule:
    """The graph of ``function`` and of its gradients, without anything that writes.

    Its inputs are those of ``function`` ("primals") and the gradients of the outputs that need one
    ("tangents"); its outputs those of ``function``, then a gradient or None for each input. Inputs
    may not be written or handed back. The operators are those that Inductor decomposes into, with
    the casts of the autocast that is on; what draws masks and numbers stays native's. Without
    ``gradients`` the outputs are those of ``function`` alone.
    """
    import torch
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.traceback import preserve_node_meta

    aten = torch.ops.aten
    drawn = {aten.bernoulli.p, aten.bernoulli_.float, aten.native_dropout.default}
    # Which of these have rules differs between versions of torch.
    for name in ("uniform", "uniform_", "normal_", "normal_functional", "exponential_"):
        drawn.add(getattr(aten, name).default)
    drawn.add(aten.exponential.default)
    table = {op: rule for op, rule in select_decomp_table().items() if op not in drawn}
    # The same formula, of operators that generated code has.
    table[aten._weight_norm_interface_backward.default] = aten._weight_norm_differentiable_backward
    # A program leaves the block of autocast before it calls backward. What an operator was before
    # it was decomposed (`original_aten`) is noted where metadata is kept.
    with (
        torch.set_grad_enabled(gradients),
        preserve_node_meta(),
        config.patch(backward_pass_autocast="off"),
        _unrolls_recurrent_layers(gradients),
    ):
        made: Any = aot_export_joint_simple(
            function, inputs, trace_joint=gradients, decompositions=table
        )
    return cast("torch.fx.GraphModule", made)


def split_joint_graph(
    joint: torch.fx.GraphModule,
    outputs: int,
    kept: Collection[int] = (),
    kept_outputs: Collection[int] = (),
    leaner: bool = False,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward, backward) of a `joint_graph` whose function has that many outputs.

    The forward returns more at its end: what the backward takes before the tangents. What is cheap
    is computed again instead. ``kept`` are the inputs that last until the backward anyway, and
    ``kept_outputs`` the outputs; of another input a copy is made, which costs as much as a tensor
    that is written for the backward. ``leaner``: long chains of pointwise operators are computed
    again, too, which takes longer and keeps less.
    """
    from torch._functorch import config, partitioners

    given = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    costs = {node.name: 2 for index, node in enumerate(given) if index not in kept}
    (output,) = joint.graph.find_nodes(op="output")
    costs |= {output.args[0][index].name: 0 for index in kept_outputs}
    size_of: Any = partitioners._size_of

    def size(node: torch.fx.Node) -> int:
        return int(size_of(node)) * costs.get(node.name, 1)

    with (
        _replaced(partitioners, "_size_of", size),
        # What draws is not computed again (`keep_draws`); attention without dropout draws nothing.
        _replaced(partitioners, "has_recomputable_rng_ops", lambda _: False),
        config.patch(_LEANER if leaner else {}),
    ):
        forward, backward = partitioners.min_cut_rematerialization_partition(
            joint, (), num_fwd_outputs=outputs, static_lifetime_input_indices=[*kept]
        )
    return forward, backward


# Of `torch._functorch.config`: what it would rather keep than compute again.
_LEANER = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether an input of a `joint_graph` is the gradient of an output."""
    return str(node.target).startswith("tangents")


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
