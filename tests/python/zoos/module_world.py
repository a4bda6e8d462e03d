"""Modules that read the world around them, each with a change of it. Importable, as module_zoo.py.

`CASES` has for each a module and what changes an answer of its forward; rows of the same kind as
those of a review that found kernels with old values.
"""

from __future__ import annotations

import abc
import argparse
import builtins
import collections
import dataclasses
import datetime
import enum
import functools
import os
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

import module_world_parts
import torch
from module_world_parts import Gained, Gains, Options, Tasks
from module_world_settings import Settings
from torch import nn
from torch.nn import functional

ARGS = argparse.Namespace(scale=2.0, act="relu")
SPACE = types.SimpleNamespace(k=3.0)
CACHED = types.SimpleNamespace(k=3.0)
QUEUE = collections.deque([1.0, 2.0])
METHODS: dict[str, Any] = {"a": torch.Tensor.dim}
DEFAULTS = collections.defaultdict(float, a=2.0)
TABLE = torch.linspace(0, 1, 8)


class _Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.5


class _Mixed:
    def __init__(self) -> None:
        self.scale = 2.0
        self.table = torch.ones(8)


class Level(enum.Enum):
    """Its member's value can be replaced."""

    HIGH = 3.0


SLOTS, MIXED, PAIR = _Slots(), _Mixed(), [torch.ones(8), 3.0]


class _Meta(type):
    gain = 1.25
    table = {"a": 2.0}  # noqa: RUF012

    def __getitem__(cls, key: str) -> float:
        return cls.table[key]


class _Made(metaclass=_Meta):
    pass


class _Row(list):  # type: ignore[type-arg]
    """A class of the program around items."""


class _Box:
    def __init__(self) -> None:
        self.value = 2.0


class _OtherBox(_Box):
    @property
    def value(self) -> float:
        """Comes before the attribute."""
        return 5.0

    @value.setter
    def value(self, _: float) -> None:
        pass


class _Empty:
    pass


class _Named:
    pass


class _WithDefault(dict):  # type: ignore[type-arg]
    otherwise = 2.0

    def __missing__(self, key: str) -> float:
        return self.otherwise


class _Abstract(abc.ABC):  # noqa: B024 (classes are registered with it)
    pass


# What programs leave in modules that are not theirs.
builtins.test_world_gain = 2.0  # type: ignore[attr-defined]

ROW, BOX, SECOND_BOX, EMPTY = _Row([2.0]), _Box(), _Box(), _Empty()
DAY = datetime.date(2002, 1, 1)
WITH_DEFAULT = _WithDefault()


def by_default(value: float = 2.0, *, more: float = 0.0) -> float:
    """Returns what its defaults are."""
    return value + more


def by_keyword(*, value: float = 2.0) -> float:
    """Has a keyword's default alone."""
    return value


OPTIONS, TASKS = Options(), Tasks.FIRST
PLACES, MANY = {(1, 2)}, tuple(range(100))


def marked() -> None:
    """Something is assigned to it."""


@functools.lru_cache
def cached_factor(n: int) -> float:
    """What is cached was made with the old value."""
    return n * CACHED.k


class World(Settings, nn.Module):
    """Runs one of the functions below, or of `Settings`, on something worth a kernel."""

    def __init__(self, reads: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.parts = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Hardtanh(-0.3, 0.2)})
        self.reads = reads.__name__
        # Of classes that are other ones after their case.
        if self.reads in ("metaclass", "layer"):
            self.inner = Gained() if self.reads == "metaclass" else nn.Softplus()
        if self.reads == "pair_of_module":
            self.pair = [torch.ones(8), 3.0]
        self.plain = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(self.dense(x).tanh() + 0.5)
        return getattr(self, self.reads)(y)

    def namespace(self, y: torch.Tensor) -> torch.Tensor:
        """Global objects of classes of the standard library."""
        return y * ARGS.scale

    def chosen(self, y: torch.Tensor) -> torch.Tensor:
        """A branch by the command line."""
        return y.relu() if ARGS.act == "relu" else y.sigmoid()

    def space(self, y: torch.Tensor) -> torch.Tensor:
        """As `namespace`."""
        return y * SPACE.k

    def queue(self, y: torch.Tensor) -> torch.Tensor:
        """An item of a deque."""
        return y + QUEUE[0]

    def slots(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute in a slot."""
        return y * SLOTS.value

    def beside(self, y: torch.Tensor) -> torch.Tensor:
        """A number beside a tensor in a global object."""
        return y * MIXED.scale

    def pair_of_global(self, y: torch.Tensor) -> torch.Tensor:
        """A number beside a tensor in a global list."""
        return y * PAIR[1]

    def pair_of_module(self, y: torch.Tensor) -> torch.Tensor:
        """The same, in the module."""
        return y * self.pair[1]

    def table(self, y: torch.Tensor) -> torch.Tensor:
        """A global tensor."""
        return y * TABLE

    def cached(self, y: torch.Tensor) -> torch.Tensor:
        """A helper whose answers are cached."""
        return y * cached_factor(2)

    def order(self, y: torch.Tensor) -> torch.Tensor:
        """The order of modules."""
        for part in self.parts.values():
            y = part(y - 0.1)
        return y

    def level(self, y: torch.Tensor) -> torch.Tensor:
        """The value of a member of an enum."""
        return y * Level.HIGH.value

    def meta(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute of a metaclass."""
        return y * _Made.gain

    def written(self, y: torch.Tensor) -> torch.Tensor:
        """A plain attribute, whichever way it was written."""
        return y * self.plain

    def default(self, y: torch.Tensor) -> torch.Tensor:
        """The default of a function."""
        return y * by_default()

    def keyword(self, y: torch.Tensor) -> torch.Tensor:
        """The default of a keyword."""
        return y * by_keyword()

    def own_default(self, y: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """The default of a method of the module's."""
        return y * scale

    def other_class(self, y: torch.Tensor) -> torch.Tensor:
        """An object whose class may become another one."""
        return y * BOX.value

    def property_first(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute, before which a property of the class may come."""
        return y * SECOND_BOX.value

    def item(self, y: torch.Tensor) -> torch.Tensor:
        """An item of a list whose class may be asked for it."""
        return y * ROW[0]

    def missing(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute that is not there yet."""
        return y * getattr(EMPTY, "value", 2.0)

    def of_its_class(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute of a class that the object may get itself."""
        return y * float(WITH_DEFAULT["a"])

    def builtin(self, y: torch.Tensor) -> torch.Tensor:
        """A name of Python's that the file may take."""
        return y * abs(-2.0)

    def day(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute of an object of C."""
        return y * (DAY.year - 2000.0)

    def class_name(self, y: torch.Tensor) -> torch.Tensor:
        """The name of a class."""
        return y * len(_Named.__name__)

    def annotation(self, y: torch.Tensor) -> torch.Tensor:
        """What no guard has."""
        return y * len(by_default.__annotations__)

    def method_of_c(self, y: torch.Tensor) -> torch.Tensor:
        """A method that C has, in a table; TorchDynamo puts no guard on it."""
        return y * 2 if METHODS["a"](torch.zeros(2, 2)) == 2 else y.sin()

    def with_default(self, y: torch.Tensor) -> torch.Tensor:
        """A dict that would have an answer to any key."""
        return y * DEFAULTS["a"]

    def asked_of_function(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute that a function has not yet."""
        return y * (3.0 if hasattr(marked, "gain") else 2.0)

    def asked_of_tensor(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute that a parameter has not yet."""
        return y * getattr(self.dense.weight, "gain", 2.0)

    def function_name(self, y: torch.Tensor) -> torch.Tensor:
        """What a function is called."""
        return y * len(marked.__name__)

    def builtin_constant(self, y: torch.Tensor) -> torch.Tensor:
        """A constant among Python's names."""
        return y * test_world_gain  # type: ignore[name-defined]  # noqa: F821

    def class_item(self, y: torch.Tensor) -> torch.Tensor:
        """What a metaclass makes of an operator."""
        return y * _Made["a"]

    def registered(self, y: torch.Tensor) -> torch.Tensor:
        """Whether a class was registered with an abstract one."""
        return y * (3.0 if isinstance(EMPTY, _Abstract) else 2.0)

    def as_dict(self, y: torch.Tensor) -> torch.Tensor:
        """A field among all, each of which is copied."""
        return y * dataclasses.asdict(OPTIONS)["value"]

    def flags(self, y: torch.Tensor) -> torch.Tensor:
        """Whether flags have a member."""
        return y * (3.0 if Tasks.SECOND in TASKS else 2.0)

    def metaclass(self, y: torch.Tensor) -> torch.Tensor:
        """An attribute that a submodule's class has of its metaclass."""
        return self.inner(y)

    def layer(self, y: torch.Tensor) -> torch.Tensor:
        """The forward of a class of PyTorch."""
        return self.inner(y)

    def kind(self, y: torch.Tensor) -> torch.Tensor:
        """A method of an object that is made here, of a class that is not what its name says."""
        return y * module_world_parts.KIND().get()

    def places(self, y: torch.Tensor) -> torch.Tensor:
        """How many tuples a set has."""
        return y * (1.0 + len(PLACES))

    def far(self, y: torch.Tensor) -> torch.Tensor:
        """An item far back in a tuple."""
        return y * float(sum(MANY) % 7 + 1)


def _reverse(model: World) -> None:
    first = model.parts.pop("a")
    model.parts["a"] = first


def _set(owner: Any, name: str, value: Any) -> Callable[[World], None]:
    return lambda _: setattr(owner, name, value)


def _put(owner: Any, key: Any, value: Any) -> Callable[[World], None]:
    return lambda _: owner.__setitem__(key, value)


def _other_space(_: World) -> None:
    CACHED.k = 7.0
    cached_factor.cache_clear()


CASES: dict[str, Callable[[World], Any]] = {
    "namespace": _set(ARGS, "scale", 5.0),
    "chosen": _set(ARGS, "act", "sigmoid"),
    "space": _set(SPACE, "k", 5.0),
    "queue": _put(QUEUE, 0, 4.0),
    "slots": _set(SLOTS, "value", 4.0),
    "beside": _set(MIXED, "scale", 4.0),
    "pair_of_global": _put(PAIR, 1, 4.0),
    "pair_of_module": lambda model: model.pair.__setitem__(1, 4.0),
    "table": lambda _: TABLE.add_(1.0),
    "cached": _other_space,
    "function": _set(functional, "gelu", torch.sin),
    "method": _set(torch.Tensor, "exp", lambda x: x.sin()),
    "operator": _set(torch.Tensor, "__matmul__", lambda x, y: x.mm(y) + 1),
    "environment": lambda _: os.environ.__setitem__("TEST_WORLD", "3.0"),
    "order": _reverse,
    "level": _set(Level.HIGH, "_value_", 9.0),
    "meta": _set(_Meta, "gain", 9.0),
    "method_of_c": _put(METHODS, "a", torch.Tensor.numel),
    "with_default": _put(DEFAULTS, "a", 4.0),
    "tracer": lambda _: None,
    "written": lambda model: object.__setattr__(model, "plain", 5.0),
    "default": _set(by_default, "__defaults__", (5.0,)),
    "keyword": _set(by_keyword, "__kwdefaults__", {"value": 5.0}),
    "other_class": _set(BOX, "__class__", _OtherBox),
    "property_first": lambda _: setattr(_Box, "value", property(lambda self: 5.0)),
    "item": _set(_Row, "__getitem__", lambda *_: 5.0),
    "missing": _set(_Empty, "value", 5.0),
    "of_its_class": _set(WITH_DEFAULT, "otherwise", 5.0),
    "folder": _set(tempfile, "tempdir", "/var/tmp/another"),
    "group": lambda _: torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ),
    "builtin": lambda _: globals().__setitem__("abs", lambda _: 5.0),
    "day": lambda _: globals().__setitem__("DAY", datetime.date(2005, 1, 1)),
    "class_name": _set(_Named, "__name__", "Another"),
    "annotation": _set(by_default, "__annotations__", {}),
    "variable_of_bytes": lambda _: os.environ.__setitem__("TEST_WORLD_BYTES", "3.0"),
    "autocast_dtype": lambda _: torch.set_autocast_dtype("cpu", torch.float16),
    "list_of_torch": lambda _: torch.test_world_gains.append(3.0),  # type: ignore[attr-defined]
    "asked_of_torch": _set(functional, "test_world_asked", 5.0),
    "asked_of_function": _set(marked, "gain", 5.0),
    "asked_of_tensor": lambda model: setattr(model.dense.weight, "gain", 5.0),
    "function_name": _set(marked, "__name__", "another"),
    "imported": _put(sys.modules, "test_world_imported", types.ModuleType("test_world_imported")),
    "builtin_constant": _set(builtins, "test_world_gain", 5.0),
    "class_item": _put(_Meta.table, "a", 5.0),
    "tensor_cores": _set(torch.backends.cuda.matmul, "allow_tf32", True),
    "as_dict": _set(OPTIONS, "value", 5.0),
    "flags": lambda _: globals().__setitem__("TASKS", Tasks.FIRST | Tasks.SECOND),
    "metaclass": _set(Gains, "gain", 5.0),
    "layer": _set(nn.Softplus, "forward", lambda self, y: y.sin()),
    "kind": lambda _: setattr(module_world_parts, "KIND", module_world_parts.kind_of(5.0)),
    "places": lambda _: PLACES.add((3, 4)),
    "far": lambda _: globals().__setitem__("MANY", (*range(99), 100)),
    "sums": lambda _: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "registered": lambda _: _Abstract.register(_Empty),
    # Last: the class is another one from here on, for which workers have no code.
    "own_default": _set(World.own_default, "__defaults__", (5.0,)),
}
# What has a kernel until it changes. The others are refused: they cannot be watched, or a trace is
# not what eager runs.
KERNELS = frozenset(
    ("namespace", "chosen", "space", "function", "method", "operator", "environment")
) | {"order", "level", "meta"}
KERNELS |= {"written", "default", "keyword", "own_default", "other_class", "property_first", "item"}
KERNELS |= {
    "method_of_c",
    "with_default",
    "missing",
    "builtin",
    "day",
    "class_name",
    "variable_of_bytes",
    "slots",
}
KERNELS |= {"list_of_torch", "asked_of_torch", "asked_of_function", "function_name", "imported"}
KERNELS |= {"builtin_constant", "of_its_class", "kind", "places", "far"}
KERNELS |= {"metaclass", "layer", "as_dict", "flags", "tracer", "pair_of_module"}


def made(name: str) -> World:
    """The module of a case, the same in every process."""
    torch.manual_seed(1)
    return World(getattr(World, name)).eval()
