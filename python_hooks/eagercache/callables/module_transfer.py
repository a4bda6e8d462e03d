"""A module and one of its calls, on their way to a compile worker.

Code and plain attributes are pickled (classes of ``__main__`` by value); tensors are not: a worker
makes its own of the same metadata. Small tensors, and integers that may be indices, travel with
their values; of others a few statistics, so that what stands in for a variance is no negative
number. The bytes go to a process of the same user through a pipe and are never stored.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import pickle
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import CustomOpDef

from eagercache.base.load import core
from eagercache.callables import custom_operators
from eagercache.callables.answer_structure import outcome_of
from eagercache.callables.arguments import argument_tensors, sized_values
from eagercache.callables.function_transfer import Packer
from eagercache.callables.made_classes import (
    classes_of_main,
    fields_of,
    functions_of_main,
    is_model_output,
    is_named_tuple,
    is_rebuilt,
    make_object,
    reduced_parametrized,
    slots_of,
)
from eagercache.callables.module_identity import SHARDING_MARKS, Unfit, identify
from eagercache.callables.module_stores import ModuleStores
from eagercache.callables.module_tensors import TensorSlot
from eagercache.callables.objects import CallObjects, Change, map_sized
from eagercache.callables.program_values import ProgramValues, collect
from eagercache.callables.standins import NotTransferable, Standin, describe, statistics_of
from eagercache.callables.written_tensors import Contents, Write, WriteSearch
from eagercache.calls import known_hooks
from eagercache.calls.numerics import ProofFailed, move_last_places
from eagercache.calls.opaque import OpaqueAttribute, Placeholder, hide
from eagercache.calls.storage import stored_part
from eagercache.calls.texts import named_line

MAX_PICKLE_BYTES = 16 << 20
MAX_MODEL_BYTES = 4 << 30


class _Pickler(Packer):
    def __init__(
        self, file: io.BytesIO, request: str = "", opaque: Sequence[OpaqueAttribute] = ()
    ) -> None:
        super().__init__(file, request)
        self._opaque = {id(one.value): one for one in opaque if not one.is_shared}
        self.opened: set[type] = set()  # classes of the call's objects that have slots
        self.standins: list[Standin] = []
        self._known: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | str | None:
        """The number of a tensor, or why an attribute is opaque."""
        if id(value) in self._opaque:
            return self._opaque[id(value)].reason
        if not isinstance(value, torch.Tensor):
            return None
        index = self._known.get(id(value))
        if index is None:
            index = self._known[id(value)] = len(self.standins)
            self._kept.append(value)
            with contextlib.nullcontext() if core is None else core.native_calls():
                self.standins.append(describe(value))
        return index

    def reducer_override(self, value: Any) -> Any:
        """What is not pickled as it says itself. Raises NotTransferable."""
        if isinstance(value, CustomOpDef):
            reduced = custom_operators.reduced(value)
            if reduced is None:
                raise NotTransferable(f"it calls the custom operator {value._qualname}")
            return reduced
        kind = type(value)
        if is_model_output(kind) or is_named_tuple(kind) or kind in self.opened:
            return make_object, (kind, dict(fields_of(value)))
        return (
            reduced_parametrized(value)
            or known_hooks.reduced(value)
            or super().reducer_override(value)
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, index: Any) -> torch.Tensor | Placeholder:
        return Placeholder(index) if isinstance(index, str) else self._tensors[index]


def pack(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Text that `unpack` reads in another process. Raises NotTransferable."""
    total = sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])
    if total > MAX_MODEL_BYTES:
        raise NotTransferable(f"its {total >> 20} MiB of tensors are too many for a proof")
    file = io.BytesIO()
    opaque: tuple[OpaqueAttribute, ...] = ()
    with contextlib.suppress(Unfit):  # which a worker finds as well
        opaque = identify(module, allow_opaque=True).opaque
    pickler = _Pickler(file, opaque=opaque)
    for kind in map(type, CallObjects(args, kwargs).found):
        if not is_rebuilt(kind):
            name = kind.__name__
            raise NotTransferable(f"an argument is a {name}, which a worker cannot rebuild")
        if slots_of(kind):
            pickler.opened.add(kind)
    try:
        pickler.dump((module, args, dict(kwargs)))
        pickler.dump((pickler.classes_of_main, pickler.functions_of_main))
        pickler.dump([part.training for part in module.modules()])
        pickler.dump([(one.path, one.name, one.reason) for one in opaque])
        values = collect(module)
        operators = (
            custom_operators.pickled_of_script(functools.partial(_pickled, pickler.request))
            if pickler.classes_of_main
            else ([], [])
        )
    except NotTransferable:
        raise
    except Exception as error:
        raise NotTransferable(f"it cannot be pickled: {named_line(error)}") from error
    if file.tell() > MAX_PICKLE_BYTES:
        raise NotTransferable("its code and attributes refer to too much data")
    parts = (pickler.standins, file.getvalue(), values, operators)
    return base64.b64encode(pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)).decode()


def _pickled(request: str, value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, request).dump(value)
    return file.getvalue()


@dataclass
class Transferred:
    """A rebuilt module and call. `draw` gives its tensors other values, in place.

    Attributes:
        values: what the program set in modules and classes; the module is run with them applied.
        objects: those among the arguments, which a forward changes, and what it assigns to
            attributes of the module; see `finds_stores`.
        writes: the forward's, into tensors in the objects and buffers; see `finds_writes`.
        buffers: those of the module that it writes into, as `writes` has them.
        classes, functions: those of the program's `__main__`, by their names.
        key: of the call in the program; empty where it may be another one here.
        draws: whether a call without gradients draws from torch's generators, once that is known.
        rounded_to: the coarsest dtype to which the forward casts numbers, once that is known; None
            where it casts to none.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _tensors: list[torch.Tensor]
    _standins: list[Standin]
    values: ProgramValues = field(default_factory=ProgramValues)
    objects: CallObjects = field(init=False)
    writes: tuple[Write, ...] = ()
    buffers: list[torch.Tensor] = field(default_factory=list)
    classes: dict[str, type] = field(default_factory=dict)
    functions: dict[str, types.FunctionType] = field(default_factory=dict)
    key: bytes = b""
    draws: bool = False
    rounded_to: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.objects = CallObjects(self.args, self.kwargs)

    def run(self) -> Any:
        """What a call of the module does (`outcome_of`); at the end copies of what it writes.

        Its objects and attributes are put back. Raises Unfit for what no kernel can do to them,
        ProofFailed where a kernel has not done it.
        """
        with self._put_back():
            outcome = outcome_of(self.module(*self.args, **self.kwargs), self.objects)
            stores = self.objects.stores
            if stores is not None and not stores.have(argument_tensors(self.args, self.kwargs)):
                raise ProofFailed("an attribute has not the argument that the forward assigns")
            if not self.writes:
                return outcome
            return outcome, [tensor.clone() for tensor in self.written]

    def run_once(self) -> tuple[Any, list[Change]]:
        """A call's answer, and what it put into objects and attributes, which are put back."""
        with self._put_back():
            answer = self.module(*self.args, **self.kwargs)
            return answer, self.objects.changes()

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        contents = Contents(self.written)
        try:
            yield
        finally:
            self.objects.restore()
            contents.restore()

    @contextlib.contextmanager
    def finds_writes(self, slots: Sequence[TensorSlot]) -> Iterator[None]:
        """A block that runs the forward once, after which `writes` are known. Raises Unfit.

        So is what it assigns (`finds_stores`). ``slots`` are the module's tensors, as `identify`
        finds them.
        """
        search = WriteSearch(self.args, self.kwargs, self.objects.found, slots)
        with self.finds_stores(), search.watched():
            yield
        self.writes = search.found
        self.buffers = [slots[write.index].tensor for write in self.writes if write.of_module]

    def objects_of(self, module: torch.nn.Module, args: Any, kwargs: Any) -> CallObjects:
        """`objects` of a like call of a copy of the module."""
        found = CallObjects(args, kwargs)
        found.stores = None if self.objects.stores is None else self.objects.stores.of(module)
        return found

    @contextlib.contextmanager
    def finds_stores(self) -> Iterator[None]:
        """A block that runs the forward once, after which ``objects`` know what it assigns.

        That is put back. Raises Unfit.
        """
        stores = ModuleStores(self.module)
        yield
        try:
            stores.find(argument_tensors(self.args, self.kwargs))
        finally:
            stores.restore()
        self.objects.stores = stores if stores.places or stores.given else None

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that the forward writes into, as `writes` has them."""
        return [*self.written_arguments, *self.buffers]

    @property
    def written_arguments(self) -> list[torch.Tensor]:
        """Those that are in objects of the call."""
        tensors = argument_tensors(self.args, self.kwargs) if self.writes else []
        return [tensors[write.index] for write in self.writes if not write.of_module]

    def draw(self, seed: int, spread: float = 1.0) -> None:
        """Random values with the statistics of the originals, times ``spread`` in width."""
        generators: dict[torch.device, torch.Generator] = {}
        with torch.no_grad():
            for tensor, standin in zip(self._tensors, self._standins, strict=True):
                where = tensor.device
                if where not in generators:
                    generators[where] = torch.Generator(where).manual_seed(seed)
                values = _values(standin, generators[where], spread)
                stored_part(tensor, tensor).copy_(stored_part(values, tensor))

    @property
    def attributes(self) -> set[str]:
        """The names of all attributes that the program gave to tensors, which are not here."""
        return {name for standin in self._standins for name in standin.attributes}

    def move(self, seed: int) -> None:
        """Moves every floating-point number by the last place that the forward sees of it."""
        move_last_places(self._tensors, seed, self.rounded_to)

    def require_gradients(self) -> None:
        """Lets the tensors that needed gradients need them, the call's arguments too."""
        for tensor, standin in zip(self._tensors, self._standins, strict=True):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_(standin.requires_grad)

    def resized(self, sizes: Mapping[int, Sequence[int]]) -> Transferred:
        """The same module, called with arguments of other sizes, or counts of other values.

        ``sizes`` are by place in `sized_values`. Each tensor is dense, in the order of its
        dimensions that it had. The module's tensors are shared.
        """
        arguments = sized_values(self.args, self.kwargs)
        tensors, standins = list(self._tensors), list(self._standins)
        made: dict[int, torch.Tensor] = {}
        for argument, wanted in sizes.items():
            old = arguments[argument]
            if not isinstance(old, torch.Tensor):
                continue
            index = next(i for i, tensor in enumerate(tensors) if tensor is old)
            standins[index] = _resized(standins[index], wanted)
            made[id(old)] = tensors[index] = standins[index].make()
        counts = iter(
            sizes[place][0] if place in sizes else value
            for place, value in enumerate(arguments)
            if not isinstance(value, torch.Tensor)
        )
        args, kwargs = map_sized(
            (self.args, self.kwargs),
            lambda tensor: made.get(id(tensor), tensor),
            lambda _: next(counts),
        )
        member = Transferred(self.module, args, kwargs, tensors, standins, self.values)
        member.writes, member.buffers = self.writes, self.buffers
        member.objects.stores = self.objects.stores
        member.rounded_to = self.rounded_to
        member.draw(seed=0)
        return member


def _resized(standin: Standin, sizes: Sequence[int]) -> Standin:
    order = sorted(range(len(sizes)), key=lambda d: (standin.strides[d], -d))
    strides, step = [0] * len(sizes), 1
    for dimension in order:
        strides[dimension] = step
        step *= sizes[dimension]
    statistics: dict[str, Any] = {}
    if standin.data is not None:
        statistics = statistics_of(_exact(standin, standin.data).flatten())
    return dataclasses.replace(
        standin, sizes=tuple(sizes), strides=tuple(strides), data=None, **statistics
    )


def _exact(standin: Standin, data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(standin.sizes, dtype=standin.dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(standin.dtype).view(standin.sizes)


def _values(standin: Standin, generator: torch.Generator, spread: float) -> torch.Tensor:
    sizes, device = standin.sizes, generator.device
    if standin.data is not None and (spread == 1.0 or not standin.dtype.is_floating_point):
        return _exact(standin, standin.data)
    if standin.data == b"":
        return torch.empty(sizes, device=device)
    if standin.data is not None:
        exact = _exact(standin, standin.data).to(device, torch.float32)
        low = float(exact.min())
        jitter = torch.randn(sizes, generator=generator, device=device) * (spread - 1.0) * 0.1
        moved = exact + jitter * exact.abs()
        return moved.abs() if low >= 0 else moved
    if standin.dtype == torch.bool:
        return torch.rand(sizes, generator=generator, device=device) < standin.mean
    if not (standin.dtype.is_floating_point or standin.dtype.is_complex):
        low, high = int(standin.low), int(standin.high) + 1
        return torch.randint(low, high, sizes, generator=generator, device=device)
    values = torch.randn(sizes, generator=generator, device=device)
    values = values * (standin.std * spread) + standin.mean
    return values.abs().clamp_(min=max(standin.low, 0.0) * 0.5) if standin.low >= 0 else values


def unpack(text: str) -> Transferred:
    """Rebuilds what `pack` packed. Imports the modules that define its classes."""
    standins, body, values, (operators, libraries) = pickle.loads(base64.b64decode(text))
    for path in libraries:
        torch.ops.load_library(path)
    for operator in operators:
        _Unpickler(io.BytesIO(operator), []).load()
    tensors = [standin.make() for standin in standins]
    unpickler = _Unpickler(io.BytesIO(body), tensors)
    module, args, kwargs = unpickler.load()
    classes, functions = unpickler.load()
    # Classes that pickle themselves as their arguments, such as einops' layers, lose it.
    for part, training in zip(module.modules(), unpickler.load(), strict=False):
        part.training = training
    hide(module, unpickler.load())  # a state of its own may have something else there
    for part in module.modules():
        for mark in SHARDING_MARKS & vars(part).keys():
            delattr(part, mark)
    transferred = Transferred(module, args, kwargs, tensors, standins, values)
    transferred.classes, transferred.functions = classes, functions
    transferred.draw(seed=0)
    return transferred


@contextlib.contextmanager
def unpacked(text: str) -> Iterator[Transferred]:
    """`unpack`, in a block in which modules and classes hold what the program set in them."""
    transferred = unpack(text)
    classes_of_main.update(transferred.classes)
    functions_of_main.update(transferred.functions)
    try:
        with transferred.values.applied():
            yield transferred
    finally:
        classes_of_main.clear()
        functions_of_main.clear()
