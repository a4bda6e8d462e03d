"""What a deployed module's program takes and gives.

Between the worker that compiles it, the process that writes the artifact, and the core
(dispatcher/deployed/program_spec.h).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity

# (names, kind, dtype, sizes, strides), as the core takes constants
ConstantRow = tuple[list[str], int, str, list[int], list[int]]

PARAMETER, BUFFER, FOLDED = range(3)
KINDS = ("parameter", "buffer", "folded")


class CannotDeploy(ValueError):
    """The module, or this call of it, can be no artifact: one line that says why."""


def dtype_name(dtype: torch.dtype) -> str:
    """As "float32"."""
    return str(dtype).removeprefix("torch.")


def form_of(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's metadata, as the core reads it."""
    return {
        "dtype": dtype_name(tensor.dtype),
        "sizes": list(tensor.size()),
        "strides": list(tensor.stride()),
    }


def input_names(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """A name for each tensor of a call, in the order of `argument_tensors`."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names: list[str] = []
    for index, value in enumerate(args):
        name = positional[index] if index < len(positional) else f"args.{index}"
        names += _names(name, value)
    for name, value in kwargs.items():
        names += _names(name, value)
    if len(names) != len(argument_tensors(args, kwargs)):
        raise CannotDeploy("an argument holds tensors in a container that cannot be stored")
    return names


def output_names(answer: Any) -> list[str]:
    """A name for each tensor of an answer: its keys or positions, "output" for one alone."""
    paths, _ = pytree.tree_flatten_with_path(answer)
    names = []
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor):
            parts = [_key_text(key) for key in path]
            plain = isinstance(answer, Mapping) or not parts
            names.append(".".join(parts if plain and parts else ["output", *parts]))
    return names


def _names(name: str, value: Any) -> list[str]:
    paths, _ = pytree.tree_flatten_with_path(value)
    return [
        ".".join([name, *map(_key_text, path)])
        for path, leaf in paths
        if isinstance(leaf, torch.Tensor)
    ]


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """How a call's arguments are made of its tensors, as JSON. Raises CannotDeploy."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = argument_tensors(args, kwargs)
    rows: list[dict[str, Any]] = []
    met = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if met >= len(tensors) or leaf is not tensors[met]:
                raise CannotDeploy("an argument holds tensors in a container without an order")
            rows.append({"tensor": met})
            met += 1
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            rows.append({"value": leaf})
        else:
            raise CannotDeploy(f"an argument is a {type(leaf).__name__}")
    if met != len(tensors):
        raise CannotDeploy("an argument holds tensors in a container that cannot be stored")
    try:
        text = pytree.treespec_dumps(spec)
    except Exception as error:
        raise CannotDeploy(f"the call's arguments cannot be stored: {error}") from error
    return json.dumps({"spec": text, "leaves": rows})


def constant_rows(
    identity: Identity, folded: Sequence[Mapping[str, Any]]
) -> tuple[list[ConstantRow], dict[int, int], list[torch.Tensor]]:
    """A module's constants, the row of each of its slots, and the rows' tensors.

    A tensor that stands under several names is one constant. Folded ones come last and have no
    tensor here. Empty tensors are left out: nothing reads them. Raises CannotDeploy.
    """
    rows: list[ConstantRow] = []
    places: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    for index, slot in enumerate(identity.slots):
        tensor = slot.tensor
        if tensor.numel() == 0:
            continue
        same = next((i for i, other in enumerate(tensors) if _is_same(other, tensor)), None)
        if same is not None:
            rows[same][0].append(slot.full_name)
            places[index] = same
            continue
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise CannotDeploy(f"{slot.full_name} has elements that share memory")
        kind = PARAMETER if slot.kind == "parameter" else BUFFER
        places[index] = len(rows)
        rows.append(([slot.full_name], kind, *_metadata(form_of(tensor))))
        tensors.append(tensor)
    for index, form in enumerate(folded):
        rows.append(([f"folded.{index}"], FOLDED, *_metadata(form)))
    return rows, places, tensors


def device_of(identity: Identity, arguments: Sequence[torch.Tensor]) -> torch.device:
    """The one device of a module's tensors and of a call's. Raises CannotDeploy."""
    tensors = [*(slot.tensor for slot in identity.slots), *arguments]
    devices = sorted({tensor.device for tensor in tensors}, key=str)
    if len(devices) > 1:
        raise CannotDeploy(
            f"its tensors and those of the call are on several devices: "
            f"{', '.join(map(str, devices))}"
        )
    device = devices[0] if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise CannotDeploy(f"it is on {device}: only the CPU and GPUs (cuda) are there")
    return device


def _metadata(form: Mapping[str, Any]) -> tuple[str, list[int], list[int]]:
    return str(form["dtype"]), list(form["sizes"]), list(form["strides"])


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (
        a.data_ptr() == b.data_ptr()
        and a.size() == b.size()
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def program_text(layout: Mapping[str, Any], places: Mapping[int, int], first_folded: int) -> str:
    """The program of what a worker compiled, over constants that stand at ``places``."""

    def source(kind: str, index: int) -> list[Any]:
        if kind == "argument":
            return [False, index]
        return [True, first_folded + index if kind == "folded" else places[index]]

    program = {
        "version": 1,
        "inputs": layout["inputs"],
        "outputs": layout["outputs"],
        "main": [source(kind, index) for kind, index in layout["main"]],
        "fold_inputs": [places[index] for index in layout["fold_slots"]],
        "folded": [first_folded + index for index in range(len(layout["folded"]))],
        "ranges": [
            [*source(kind, index), low, high] for kind, index, low, high in layout["ranges"]
        ],
        "open": layout["open"],
        "in_spec": layout["in_spec"],
        "out_spec": layout["out_spec"],
    }
    return json.dumps(program, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
