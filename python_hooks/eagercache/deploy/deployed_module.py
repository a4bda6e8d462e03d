"""A module with its weights that is open: calls, constants, readiness."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.deploy.errors import DeployError, asked, brief
from eagercache.deploy.tensors import ConstantInfo, TensorInfo, constants_of

_WAIT, _TRY, _ALONE = range(3)


_PLAIN = (bool, int, float, str, type(None))


class DeployedModule:
    """A module with its weights, compiled. `load_module` makes it. All methods are thread-safe.

    Calls run without gradients, in several threads at a time, with the interpreter lock released.
    Each is computed with one whole version of the constants. There are two sets of them: the active
    one answers; the inactive one, which comes into being with its first update, can be changed at
    leisure and then be swapped in. No call waits for an update, a swap or a fold: they make a new
    version beside the old one, which lives until its last call has ended.

    On a GPU a call gives its work to the current stream and has ended for `wait` and the runners
    when it is given; an update works on a stream of its own and returns when it is done.
    """

    def __init__(self, program: Any) -> None:
        """``program``: the core's object."""
        self._program = program
        try:
            in_text, out_text = program.call_spec
            given = json.loads(in_text)
            self._in_spec = pytree.treespec_loads(given["spec"])
            self._in_leaves = given["leaves"]
            self._unflatten = _build_unflatten(out_text)
            self._check()
        except Exception as error:  # a header that is signed may still be anything
            raise DeployError(
                f"the artifact's description of its calls is malformed ({brief(error)}); "
                "export the module again",
                "corrupt",
            ) from error

    def _check(self) -> None:
        """Reads all that the header says, which is not looked at again. Raises whatever."""
        tensors = [leaf["tensor"] for leaf in self._in_leaves if "tensor" in leaf]
        if tensors != list(range(len(self.inputs))) or self._in_spec.num_leaves != len(
            self._in_leaves
        ):
            raise ValueError("the inputs are not numbered in order")
        for leaf in self._in_leaves:
            if "tensor" not in leaf and not isinstance(leaf["value"], _PLAIN):
                raise TypeError("an argument is no plain value")
        dtypes = [info.dtype for info in (*self.inputs, *self.outputs)]
        dtypes += [constant.dtype for constant in self.constants]
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
            raise TypeError("a dtype is none")
        if len(self._keyword_names) != len(set(self._keyword_names)):
            raise ValueError("an argument is there twice")
        str(self.facts)  # they must be text

    # ---- calls -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's answer to arguments of the structure that was exported.

        Waits for a free runner. Arguments that are no tensors must equal those of the export.
        Raises DeployError for arguments that do not fit.
        """
        outputs, _ = self._run(self._tensors_of(args, kwargs), _WAIT)
        return self._unflatten(outputs)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, in the order of `output_names`, for inputs in that of `input_names`.

        Waits for a free runner.
        """
        outputs, _ = self._run(inputs, _WAIT)
        return outputs

    def run_versioned(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """As `run`; also the version of the constants that all of the answer is of."""
        return self._run(inputs, _WAIT)

    def try_run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """As `run`, but None where no runner is free."""
        try:
            outputs, _ = self._run(inputs, _TRY)
        except DeployError as error:
            if error.code == "busy":
                return None
            raise
        return outputs

    def run_single_threaded(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `run`, without a runner: for callers that limit their calls themselves."""
        outputs, _ = self._run(inputs, _ALONE)
        return outputs

    def _run(self, inputs: Sequence[torch.Tensor], place: int) -> tuple[list[torch.Tensor], int]:
        outputs, version = asked(self._program.run, list(inputs), place)
        return outputs, version

    def _tensors_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten((args, self._in_order(kwargs)))
        if spec != self._in_spec:
            theirs, ours = (" ".join(str(tree).split()) for tree in (spec, self._in_spec))
            raise DeployError(
                f"the arguments have the structure {theirs}, the exported call had {ours}",
                "invalid_argument",
            )
        tensors = []
        for value, wanted in zip(leaves, self._in_leaves, strict=True):
            if "tensor" in wanted:
                if not isinstance(value, torch.Tensor):
                    name = self.input_names[wanted["tensor"]]
                    raise DeployError(
                        f"the input {name} is a {type(value).__name__}, no tensor",
                        "invalid_argument",
                    )
                tensors.append(value)
            elif type(value) is not type(wanted["value"]) or value != wanted["value"]:
                raise DeployError(
                    f"an argument is {value!r}, the module was exported for {wanted['value']!r}",
                    "invalid_argument",
                )
        return tensors

    def _in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in the order of the exported call's."""
        names = self._keyword_names
        return {name: kwargs[name] for name in names} if set(names) == set(kwargs) else {**kwargs}

    @functools.cached_property
    def _keyword_names(self) -> list[str]:
        _, kwargs = pytree.tree_unflatten([0] * len(self._in_leaves), self._in_spec)
        return list(kwargs)

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where it runs: its inputs, answers and constants are there."""
        return torch.device(self._program.device)

    @functools.cached_property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The tensors of a call, in order."""
        is_open = {tuple(place) for place in self._program.open_sizes}
        return tuple(
            TensorInfo(
                name,
                getattr(torch, dtype),
                tuple(None if (index, d) in is_open else size for d, size in enumerate(sizes)),
            )
            for index, (name, dtype, sizes, _) in enumerate(self._program.inputs)
        )

    @functools.cached_property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The tensors of an answer, in order."""
        return tuple(
            TensorInfo(name, getattr(torch, dtype), tuple(sizes))
            for name, dtype, sizes, _ in self._program.outputs
        )

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs: the forward's parameters, with keys and positions below them."""
        return [info.name for info in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs: keys or positions in the answer, or "output"."""
        return [info.name for info in self.outputs]

    @property
    def call_spec(self) -> tuple[str, str]:
        """How (args, kwargs) and the answer are made of tensors, as JSON.

        Each has "spec", a text of ``torch.utils._pytree.treespec_dumps``, and "leaves", of which
        each is {"tensor": index} or {"value": a plain value}.
        """
        in_spec, out_spec = self._program.call_spec
        return in_spec, out_spec

    @functools.cached_property
    def constants(self) -> tuple[ConstantInfo, ...]:
        """All constants, the folded ones last."""
        return constants_of(self._program.constants)

    @property
    def facts(self) -> dict[str, str]:
        """What the export wrote down: numerics, errors, times, threads, torch."""
        return {k: v for k, v in self._program.facts.items() if k != "program"}

    @property
    def signer(self) -> str:
        """The public key that signed the artifact, in hexadecimal digits."""
        return str(self._program.signer)

    # ---- constants -------------------------------------------------------------------------------

    def constant_values(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        """Copies of the constants but for folded ones, under each of their names."""
        return dict(asked(self._program.values, inactive, False))

    def update_constants(
        self,
        values: Mapping[str, torch.Tensor],
        *,
        inactive: bool = False,
        whole: bool = False,
        copy: bool = True,
    ) -> None:
        """Gives constants other values, all of them at once or, on an error, none.

        A ``state_dict()`` will do. Dtypes and sizes must be the constants' own; strides may differ.
        Folded constants are computed anew from them: of the active set before it answers, of the
        inactive one before it is swapped in (or by `fold_constants`).

        Args:
            values: tensors by the constants' names.
            inactive: into the set that does not answer, which begins as a copy of the active one.
            whole: every constant must be given.
            copy: False: the tensors themselves are used, and must not be written while they are.

        Raises:
            DeployError: a name that is not known, a folded constant, another dtype, other sizes, or
                an index that is out of range. Nothing has changed then.
        """
        asked(self._program.update, dict(values), inactive, whole, not copy)

    def swap_constants(self) -> None:
        """The inactive set answers from now on; the other becomes the inactive one.

        Raises DeployError ("not_found") without an inactive set.
        """
        asked(self._program.swap)

    def fold_constants(self, *, inactive: bool = False) -> None:
        """Computes folded constants anew.

        Updates do that by themselves: this is for tensors that were given with ``copy=False`` and
        written since, and to have the work done before `swap_constants`.
        """
        asked(self._program.fold, inactive)

    def drop_inactive_constants(self) -> None:
        """Lets go of the inactive set's memory."""
        self._program.drop_inactive()

    @property
    def version(self) -> int:
        """The number of the active set's version: 1 is the artifact's own, and none comes twice."""
        return int(self._program.version)

    @property
    def inactive_version(self) -> int | None:
        """The number of the inactive set's version; None without one."""
        return int(self._program.inactive_version) or None

    # ---- readiness -------------------------------------------------------------------------------

    @property
    def runners(self) -> int:
        """How many calls may run at a time."""
        return int(self._program.runners)

    def is_ready(self) -> bool:
        """Whether a call would begin at once: a runner is free."""
        return bool(self._program.is_ready())

    def wait_until_ready(self, timeout: float | None = None) -> bool:
        """Waits until a runner is free; False when ``timeout`` seconds passed."""
        return bool(self._program.wait_until_ready(_seconds(timeout)))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until no call is under way; False when ``timeout`` seconds passed."""
        return bool(self._program.wait_until_idle(_seconds(timeout)))

    def __repr__(self) -> str:
        """Names of inputs and outputs, and how many constants there are."""
        return (
            f"DeployedModule({', '.join(self.input_names)} -> {', '.join(self.output_names)}; "
            f"constants: {len(self.constants)})"
        )


def _seconds(timeout: float | None) -> float:
    return 1e8 if timeout is None else timeout


def _build_unflatten(text: str) -> Any:
    from eagercache.callables.outputs import build_unflatten, spec_in

    stored = json.loads(text)
    leaves = stored["leaves"]
    if "changes" in stored or spec_in(stored["spec"]).num_leaves != len(leaves):
        raise ValueError("the outputs are no answer of a module's")
    for leaf in leaves:
        if "tensor" not in leaf and not isinstance(leaf["value"], _PLAIN):
            raise TypeError("an output is no plain value")
    build = build_unflatten(text, sum("tensor" in leaf for leaf in leaves))
    return build if build is not None else lambda outputs: outputs[0]
