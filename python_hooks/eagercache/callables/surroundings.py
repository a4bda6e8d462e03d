"""What surrounds a module's call in a worker: the call's state, and what a forward does beside."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from eagercache.callables.made_classes import classes_of_main
from eagercache.callables.used_functions import tree_classes


class Listener:
    """Stands in for a stream and notices whether anything is written."""

    def __init__(self) -> None:
        self.wrote = False

    def write(self, text: str) -> int:
        """Remembers that something came."""
        self.wrote = self.wrote or bool(text)
        return len(text)

    def flush(self) -> None:
        """Does nothing."""

    def isatty(self) -> bool:
        """No."""
        return False


def torch_states() -> list[Any]:
    """What torch's own generators are at: the CPU's, then the current GPU's."""
    states = [torch.get_rng_state().tolist()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().tolist())
    return states


def other_states() -> list[Any]:
    """What the sources of random numbers are at that are not torch's: Python's and numpy's."""
    states: list[Any] = [random.getstate()]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        states.append(repr(numpy_random.get_state()))
    return states


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """The generators of torch begin at ``seed`` in the block, and are as they were after it."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        torch.manual_seed(seed)
        yield


def own_attention_order(device: torch.device) -> list[int]:
    """The order in which this process tries attention back ends on the GPU ``device``.

    PyTorch settles it when a process first chooses one on a GPU: that is done before.
    """
    nothing = torch.empty(1, 1, 0, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(nothing, nothing, nothing)
    return torch._C._get_sdp_priority_order()


@contextlib.contextmanager
def attention_order(wanted: list[int] | None) -> Iterator[None]:
    """The order in which attention back ends are tried; None leaves it."""
    if wanted is None:
        yield
        return
    before = own_attention_order(torch.device("cuda"))
    torch._C._set_sdp_priority_order(wanted)
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


@contextlib.contextmanager
def autocast(wanted: Mapping[str, str], *, keeps_casts: bool = True) -> Iterator[None]:
    """Autocast to the dtype named for each device, for the block; {} for none.

    Casts of parameters are kept, as in a program; not so where their values change in the block.
    """
    with contextlib.ExitStack() as stack:
        for device, dtype in wanted.items():
            stack.enter_context(
                torch.autocast(device, getattr(torch, dtype), cache_enabled=keeps_casts)
            )
        yield


def autocast_here(*devices: str) -> dict[str, str]:
    """The dtype that the thread casts to on each of the devices where autocast is on."""
    return {
        device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        for device in devices
        if torch.is_autocast_enabled(device)
    }


@contextlib.contextmanager
def casts_kept() -> Iterator[None]:
    """Within `autocast`: casts of parameters are kept in the block, and dropped at its end."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


# Always the same: TorchDynamo keeps the modules that it has found by their names.
_their_main = types.ModuleType("__main__")


@contextlib.contextmanager
def main_of(module: torch.nn.Module, objects: Iterable[Any] = ()) -> Iterator[None]:
    """Lets the tracer find, in ``__main__``, the globals of classes that came from another one.

    Whoever traces a module outside of this leaves a worker's own ``__main__`` with TorchDynamo.
    ``objects``: arguments whose classes count too.
    """
    namespace: dict[str, Any] = {
        name: kind for name, kind in classes_of_main.items() if "." not in name
    }
    of_objects = {kind for value in objects for kind in type(value).__mro__}
    kinds = {kind for kind in of_objects if kind.__module__ == "__main__"}
    for kind in kinds.union(tree_classes(module, "__main__")):
        for value in vars(kind).values():
            if isinstance(value, types.FunctionType):
                namespace.update(value.__globals__)
    own = sys.modules["__main__"]
    vars(_their_main).clear()
    vars(_their_main).update({"__name__": "__main__", **namespace})
    sys.modules["__main__"] = _their_main
    try:
        yield
    finally:
        sys.modules["__main__"] = own
