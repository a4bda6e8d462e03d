"""The forward and the backward of a traced call, made anew of what the partitioner gave.

What the backward reads are inputs, answers, or what the forward makes for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from eagercache.worker.compat.size_nodes import SizeNodes, is_size
from eagercache.worker.compat.symbolic_shapes import is_open
from eagercache.worker.graphs.dropout_masks import Draw, Noise, ranges_of_given
from eagercache.worker.graphs.indices import (
    INDEXING,
    Range,
    index_ranges,
    indices_of,
    trap_negative_indices,
)
from eagercache.worker.graphs.layout import is_channels_last
from eagercache.worker.graphs.nodes import ancestors, is_made_here, operator_name
from eagercache.worker.graphs.rebuilt import (
    Part,
    Rebuilt,
    copied,
    holds,
    root_of,
    shown_by,
    views_of,
)
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.modules.joint_inputs import Inputs
from eagercache.worker.modules.training_graphs import Saved, TrainingGraphs, nbytes

_aten = torch.ops.aten

# What a backward uses as indices.
_INDEXING_BACKWARD = INDEXING | {
    "aten::embedding",
    "aten::embedding_dense_backward",
    "aten::index",
}


_Env = dict[torch.fx.Node, torch.fx.Node]


class Splitter:
    """Makes the two graphs anew of what the partitioner gave."""

    def __init__(
        self,
        forward: torch.fx.GraphModule,
        backward: torch.fx.GraphModule,
        inputs: Inputs,
        reads: Mapping[int, tuple[torch.dtype, Part | None]],
    ) -> None:
        self._forward, self._backward = forward, backward
        self._inputs, self._reads = inputs, reads
        self._arguments = list(forward.graph.find_nodes(op="placeholder"))
        # Open sizes that are handed over are made anew of those of the tensors (`SizeNodes`).
        self._returned = [node for node in _output(forward.graph).args[0] if not is_size(node)]
        into = backward.graph.find_nodes(op="placeholder")
        self._into = [node for node in into if not is_size(node)]
        self._sizes_into = [node for node in into if is_size(node)]
        if len(self._arguments) != len(inputs.values):
            raise CompileRefused("the traced graph takes another number of tensors")
        # The inputs that calls give, by their place in the graph as it was traced.
        given = [index for index, source in enumerate(inputs.sources) if source is not None]
        self._number = {self._arguments[index]: number for number, index in enumerate(given)}
        self._given = given
        self.in_objects: tuple[bool, ...] = ()
        self.redraws = False  # masks, if there are any
        # Those that the backward gets copies of: the program may write what they show.
        self._copied: set[torch.fx.Node] = set()

    def graphs(
        self,
        outputs: str,
        written: Sequence[int],
        kept: set[int],
        differentiable: Sequence[bool],
        keeps_output: Sequence[bool],
        draws: Sequence[Draw],
    ) -> TrainingGraphs:
        """The result. ``kept``: the inputs whose memory the backward may read."""
        answers, passed = len(differentiable), self._returned[len(differentiable) + len(written) :]
        in_objects = self.in_objects
        tangents = [i for i, needed in enumerate(differentiable) if needed and not in_objects[i]]
        into = self._into
        if len(into) != len(passed) + len(tangents) or not all(
            isinstance(node, torch.fx.Node) for node in passed
        ):
            raise CompileRefused("the backward takes another number of tensors")
        # What the backward reads: inputs and nodes of the forward, each once.
        chains = {node: views_of(node) for node in passed}
        roots = list(dict.fromkeys(root_of(node, chains[node]) for node in passed))
        roots = [node for node in roots if node in self._number or not _is_constant(node)]
        saved, made = self._saved(roots, kept, self._returned[:answers], keeps_output)
        forward, ranges = self._make_forward(answers + len(written), made)
        backward, gradients, reach = self._make_backward(roots, passed, chains, len(tangents))
        self._check_indices(backward, roots, ranges)
        examples = tuple(self._inputs.traced[index] for index in self._given)
        sources = [self._inputs.sources[index] for index in self._given]
        given = tuple(source for source in sources if isinstance(source, tuple))
        noise = tuple(source for source in sources if isinstance(source, Noise))
        return TrainingGraphs(
            forward=forward,
            backward=backward,
            inputs=given,
            noise=noise,
            draws=tuple(draws),
            examples=examples,
            backward_examples=tuple(
                examples[source.index] if source.kind == "input" else self._example(node)
                for source, node in [
                    *zip(saved, roots, strict=True),
                    *((Saved("tangent", 0), node) for node in into[len(passed) :]),
                ]
            ),
            ranges=ranges_of_given(ranges, len(given), noise),
            outputs=outputs,
            differentiable=tuple(differentiable),
            in_objects=self.in_objects,
            buffers=tuple(self._given.index(index) for index in written),
            buffers_read=_read(forward, [self._given.index(i) for i in written], answers),
            saved=tuple(saved),
            tangents=tuple(tangents),
            gradients=gradients,
            reach=reach,
            made_bytes=sum(nbytes(node.meta["val"]) for node in made),
            rebuilt=self._rebuilt(roots, saved),
            redraws=self.redraws and bool(noise),
        )

    def _saved(
        self,
        roots: Sequence[torch.fx.Node],
        kept: set[int],
        answers: Sequence[torch.fx.Node],
        keeps_output: Sequence[bool],
    ) -> tuple[list[Saved], list[torch.fx.Node]]:
        """Where the backward has each of ``roots`` from, and those that are made for it alone."""
        made: list[torch.fx.Node] = []
        saved: list[Saved] = []
        allowed = {self._arguments[index] for index in kept}
        for node in roots:
            if node in allowed:
                saved.append(Saved("input", self._number[node]))
            elif node in answers and keeps_output[answers.index(node)]:
                saved.append(Saved("output", answers.index(node)))
            else:
                saved.append(Saved("made", len(made)))
                made.append(node)
        return saved, made

    def _rebuilt(
        self, roots: Sequence[torch.fx.Node], saved: Sequence[Saved]
    ) -> tuple[Rebuilt, ...]:
        rows: dict[int, Rebuilt] = {}
        for position, (node, source) in enumerate(zip(roots, saved, strict=True)):
            copy = copied(node)
            if source.kind != "made" or copy.argument not in self._number:
                continue
            index = self._arguments.index(copy.argument)
            wanted, part = self._reads.get(index, (None, None))
            if wanted is None or not all(holds(dtype, wanted) for dtype in copy.dtypes):
                continue
            if self._is_given_twice(index):  # and would be two where it is made again
                continue
            if part == copy.part or (part is None and copy.is_whole):
                own = self._inputs.sources[index]
                assert isinstance(own, tuple)
                of_module, number = own
                assert not of_module
                row = Rebuilt(self._number[copy.argument], position, number, copy.part)
                rows.setdefault(number, row)
        return tuple(rows[number] for number in sorted(rows))

    def _is_given_twice(self, index: int) -> bool:
        value = self._inputs.values[index]
        return sum(other is value for other in self._inputs.values) > 1

    def _make_forward(
        self, returns: int, made: Sequence[torch.fx.Node]
    ) -> tuple[torch.fx.GraphModule, tuple[Range, ...]]:
        graph = torch.fx.Graph()
        module = torch.nn.Module()
        env: _Env = {}
        for index, node in enumerate(self._arguments):
            env[node] = self._argument(graph, module, node, index)
        _copy_body(self._forward.graph, graph, env)
        results = [env[node] for node in self._returned[:returns]]
        memory = {shown_by(node) for node in self._returned[:returns]}
        # What the backward needs, and eager's would not have read: its value now.
        for node in made:
            if node.op == "placeholder" or shown_by(node) in memory:
                self._copied.add(node)
            results.append(_clone(graph, env[node]) if node in self._copied else env[node])
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        forward = torch.fx.GraphModule(module, graph)  # which has the constants' values
        ranges = index_ranges(forward.graph)
        trap_negative_indices(forward.graph)
        forward.recompile()
        return forward, ranges

    def _example(self, node: torch.fx.Node) -> torch.Tensor:
        """A tensor as the backward gets it: a copy of a part of a tensor is dense."""
        made = _example(node)
        return made.clone() if node in self._copied else made

    def _argument(
        self, graph: torch.fx.Graph, module: torch.nn.Module, node: torch.fx.Node, index: int
    ) -> torch.fx.Node:
        """A placeholder, or the constant of the code that stands in its place."""
        if self._inputs.sources[index] is not None:
            made = graph.placeholder(node.name)
        else:
            name = f"_eagercache_constant_{index}"
            module.register_buffer(name, self._inputs.values[index].detach().clone())
            made = graph.get_attr(name)
        made.meta.update(node.meta)
        return made

    def _make_backward(
        self,
        roots: Sequence[torch.fx.Node],
        passed: Sequence[torch.fx.Node],
        chains: Mapping[torch.fx.Node, list[torch.fx.Node]],
        num_tangents: int,
    ) -> tuple[torch.fx.GraphModule, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        graph = torch.fx.Graph()
        module = torch.nn.Module()
        into = self._into
        env: _Env = {}
        here: _Env = {}  # of the forward's nodes
        tangents = into[len(passed) :]
        for node in [*roots, *tangents]:
            placeholder = graph.placeholder(node.name)
            placeholder.meta.update(node.meta)
            if node in self._copied:
                placeholder.meta["val"] = torch.empty_like(node.meta["val"])
            (env if node in tangents else here)[node] = placeholder
        sizes = SizeNodes(graph, list(graph.nodes))
        for node in self._sizes_into:
            env[node] = _size(sizes, node)
        for source, node in zip(passed, into[: len(passed)], strict=True):
            root = root_of(source, chains[source])
            if root not in here:
                self._make_constant(graph, module, root, here, sizes)
            env[node] = here[root]
            for view in reversed(chains[source]):
                env[node] = graph.node_copy(
                    view,
                    lambda before, shown=env[node]: (
                        _size(sizes, before) if is_size(before) else shown
                    ),
                )
        _copy_body(self._backward.graph, graph, env)
        wanted = list(_output(self._backward.graph).args[0])
        results: list[torch.fx.Node] = []
        numbers: list[int] = []
        reach: list[tuple[int, ...]] = []
        for index, value in enumerate(wanted):
            if value is None:
                continue
            own = env[value]
            behind = ancestors(own, but=is_size)
            reach.append(tuple(i for i, node in enumerate(tangents) if env[node] in behind))
            if self._inputs.values[index].is_contiguous() and is_channels_last(own.meta["val"]):
                own = _clone(graph, own, memory_format=torch.contiguous_format)
            elif own in results or own.op != "call_function":
                own = _clone(graph, own)
            results.append(own)
            numbers.append(self._number[self._arguments[index]])
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        return torch.fx.GraphModule(module, graph), tuple(numbers), tuple(reach)

    def _make_constant(
        self,
        graph: torch.fx.Graph,
        module: torch.nn.Module,
        root: torch.fx.Node,
        here: _Env,
        sizes: SizeNodes,
    ) -> None:
        """Puts a node of the forward that no call changes into the backward, too."""
        behind = ancestors(root)
        for node in self._forward.graph.nodes:
            if node not in behind or node in here:
                continue
            if is_size(node):
                here[node] = _size(sizes, node)
                continue
            if node.op == "placeholder":
                here[node] = self._argument(graph, module, node, self._arguments.index(node))
            else:
                here[node] = graph.node_copy(node, lambda before: here[before])

    def _check_indices(
        self,
        backward: torch.fx.GraphModule,
        roots: Sequence[torch.fx.Node],
        ranges: Sequence[Range],
    ) -> None:
        """Raises CompileRefused where the backward indexes with what was not checked before."""
        checked = {position for position, *_ in ranges}
        unchecked = {
            placeholder
            for placeholder, root in zip(
                backward.graph.find_nodes(op="placeholder"), roots, strict=False
            )
            if root in self._number
            and self._number[root] not in checked
            and not root.meta["val"].is_floating_point()
        }
        for node in backward.graph.nodes:
            if operator_name(node) not in _INDEXING_BACKWARD:
                continue
            if any(ancestors(index, but=is_size) & unchecked for index in indices_of(node)):
                raise CompileRefused(f"the backward indexes with data ({node.target})")


def _size(sizes: SizeNodes, node: torch.fx.Node) -> Any:
    """What stands for a size of the whole graph in the backward."""
    try:
        return sizes.node_for(node.meta["val"])
    except ValueError as error:
        raise CompileRefused(f"no kernel for several sizes: {error}") from error


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a constant of the code, or made of nothing that a call gives."""
    return node.op == "placeholder" or is_made_here(node)


def _output(graph: torch.fx.Graph) -> torch.fx.Node:
    (node,) = graph.find_nodes(op="output")
    return node


def _copy_body(source: torch.fx.Graph, target: torch.fx.Graph, env: _Env) -> None:
    for node in source.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = target.node_copy(node, lambda before: env[before])


def _clone(graph: torch.fx.Graph, node: torch.fx.Node, **options: Any) -> torch.fx.Node:
    clone = graph.call_function(_aten.clone.default, (node,), options)
    clone.meta["val"] = node.meta["val"].clone(**options)
    return clone


def _example(node: torch.fx.Node) -> torch.Tensor:
    """A tensor of the node's metadata; where sizes are open, one that stands for all of them."""
    value = node.meta["val"]
    if any(map(is_open, (*value.size(), *value.stride()))):
        return value
    made = torch.empty_strided(
        tuple(value.size()), tuple(value.stride()), dtype=value.dtype, device=value.device
    )
    return made.zero_()


def _read(forward: torch.fx.GraphModule, buffers: Sequence[int], answers: int) -> tuple[bool, ...]:
    """Of the inputs that are written, whether outputs beside the new values come of each."""
    placeholders = forward.graph.find_nodes(op="placeholder")
    (output,) = forward.graph.find_nodes(op="output")
    values = list(output.args[0])
    del values[answers : answers + len(buffers)]
    behind = ancestors(*(value for value in values if isinstance(value, torch.fx.Node)))
    return tuple(placeholders[index] in behind for index in buffers)
