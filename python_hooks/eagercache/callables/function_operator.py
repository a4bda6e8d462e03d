"""An operator that is a Python function: how it is registered, answers, and is told from others.

Its kernel at every key is the function itself. Over that stand the hook at CPU and CUDA, as over
any other operator, and at the autograd keys one of ours (dispatcher/autograd/function_autograd.h).
The backward is a second operator, ``<name>_backward``, whose function takes the gradient of the
first one's by autograd; one graph of that is one kernel.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from eagercache.base import callbacks
from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.callables import function_gradient
from eagercache.callables.function_identity import (
    OperatorOfFunction,
    identify_function,
    refuse_effects,
)
from eagercache.callables.module_identity import Unfit

_P = ParamSpec("_P")
_R = TypeVar("_R")

BACKWARD_SUFFIX = "_backward"

# By operator name, those of backward operators included. Guarded by the GIL; never shrinks.
registry: dict[str, CustomOperator[Any, Any]] = {}


class CustomOperator(OperatorOfFunction, Generic[_P, _R]):
    """An operator made by `op`; called like the function.

    Attributes:
        function: the function itself.
        name: the operator's, "ns::name".
        op: the operator, as torch.ops has it.
        refusal: why kernels do not answer, "" while nothing stands against them.
    """

    always = True  # enabled without being named

    def __init__(
        self,
        function: Callable[_P, _R],
        name: str,
        schema: str,
        *,
        autograd: bool,
        tags: Sequence[torch.Tag] = (),
        in_worker: bool = False,
    ) -> None:
        self.name = name
        self.schema = schema
        self.autograd = autograd
        self.refusal = ""
        self._function = cast(types.FunctionType, function)
        self._lock = threading.RLock()
        self._digest = ""
        self._codes: frozenset[str] = frozenset()
        self._modules: tuple[str, ...] = ()
        self._payload = ""
        self._due = not in_worker  # nothing was asked of the function yet
        self._in_worker = in_worker
        self._keys: list[str] = []  # where there are hooks
        self._own_autograd = False
        self.op: Any = None
        self._backward_op: Any = None
        self._library: Any = None
        self._define(tags)
        self._take_appearance()

    # ---- what people use -------------------------------------------------------------------------

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the operator."""
        return cast(_R, self.op(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<eagercache.op {self.name}{self.schema}>"

    def __reduce__(self) -> Any:
        # A function that calls this operator is traced through it.
        return _itself, (self._function,)

    @property
    def codes(self) -> frozenset[str]:
        """`code_digest` of everything that the function may run, as `identify` found it."""
        return self._codes

    @property
    def function(self) -> Callable[_P, _R]:
        """The function itself."""
        return cast(Callable[_P, _R], self._function)

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[..., Any] | None = None,
    ) -> None:
        """Gives the operator a gradient formula, as `torch.library.register_autograd` does.

        It stands in the place of the one made of the function.
        """
        from torch._library import autograd

        info = autograd.Info(backward, setup_context)
        kernel = autograd.make_autograd_impl(self.op, info)
        short = self.name.partition("::")[2]
        with self._lock, warnings.catch_warnings():
            # That the gradient made of the function is replaced is what the caller asked for.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            self._own_autograd = True
            for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
                self._library.impl(short, kernel, key, with_keyset=True, allow_override=True)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the operator another fake kernel than the function itself."""
        torch.library.register_fake(self.name, function, lib=self._library, allow_override=True)
        return function

    # ---- registration ----------------------------------------------------------------------------

    def _define(self, tags: Sequence[torch.Tag]) -> None:
        space, _, short = self.name.partition("::")
        # Kept as long as the operator: a library that is destroyed takes its operators with it.
        self._library = torch.library.Library(space, "FRAGMENT")
        self._library.define(short + self.schema, tags=tuple(tags))
        self.op = getattr(getattr(torch.ops, space), short).default
        registry[self.name] = self
        if core is None:
            self._library.impl(short, self._answer, "CompositeImplicitAutograd")
            return
        self._library.impl(short, self._answer_below, "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, self._fake, lib=self._library)
        if self.autograd:
            self._library.impl(short, self._answer, "Autograd")
            # The function, whose parts functorch batches one by one.
            self._library.impl(short, self._answer, "FuncTorchBatched")
            self._define_backward(short + BACKWARD_SUFFIX)
        self._hook()

    def _define_backward(self, short: str) -> None:
        name = self.name + BACKWARD_SUFFIX
        schema = function_gradient.backward_schema(self.schema)
        self._library.define(short + schema)
        self._backward_op = getattr(getattr(torch.ops, self.name.partition("::")[0]), short).default
        self._library.impl(short, self._gradients, "CompositeExplicitAutograd")
        self._library.impl(short, self._recorded_gradients, "Autograd")
        torch.library.register_fake(name, function_gradient.fake, lib=self._library)
        registry[name] = self

    def _hook(self) -> None:
        assert core is not None
        if "!" in self.schema:  # known beforehand, and as the program wants it: no warning
            self.refusal = "its schema says that it writes an argument"
            return
        for key in ("CPU", "CUDA") if torch.version.cuda else ("CPU",):
            try:
                core.register(self.name, "", key)
            except ValueError as error:
                self._refuse(str(error).partition(": ")[2] or str(error))
                return
            self._keys.append(key)
            if self.autograd:
                backward = self.name + BACKWARD_SUFFIX
                core.register(backward, "", key)
                core.register_autograd(backward, key, "")
                core.register_autograd(self.name, key, backward)

    def _take_appearance(self) -> None:
        for attribute in ("__module__", "__qualname__", "__name__", "__doc__"):
            if hasattr(self._function, attribute):
                setattr(self, attribute, getattr(self._function, attribute))
        self.__wrapped__ = self._function

    # ---- kernels of the operators, in the function's own words -----------------------------------

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if self._due:
            self._begin()
        return self._function(*args, **kwargs)

    def _answer_below(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            return self._answer(*args, **kwargs)
        # Below autograd a cast of a parameter has no history: nobody else may find it.
        keeps = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self._answer(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(keeps)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def _gradients(self, grads: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        return function_gradient.gradients(self._function, grads, wanted, args, kwargs)

    def _recorded_gradients(self, grads: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        return function_gradient.recorded_gradients(self._function, grads, wanted, args, kwargs)

    def answer_of(self, name: str) -> Callable[..., Any]:
        """The Python function behind the operator ``name``: this one, or its backward."""
        return self._function if name == self.name else self._gradients

    def look(self) -> None:
        """Refuses a function whose own code shows that it has effects."""
        if core is None:
            return
        try:
            refuse_effects(self._function)
        except Unfit as error:
            self._refuse(str(error))

    # ---- identity --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first call: whatever the function refers to is defined by now."""
        with self._lock:
            if not self._due:
                return
            self._due = False
        callbacks.begin_operator(self)

    def identify(self) -> bool:
        """Reads the function's code and what it refers to. Whether kernels may answer."""
        if core is None or not self._keys:
            return False
        with self._lock:
            self._due = False
            try:
                identity = identify_function(self._function)
            except Unfit as error:
                self._refuse(str(error))
                return False
            except RecursionError:
                self._refuse("what it refers to is nested too deeply")
                return False
            self._adopt(identity.digest, identity.codes)
            self._modules = identity.modules
            return not self.refusal

    def _adopt(self, digest: str, codes: frozenset[str]) -> None:
        assert core is not None
        if digest != self._digest:
            self.refusal = ""
            self._payload = ""
        self._digest, self._codes = digest, codes
        for name in self.names():
            for key in self._keys:
                core.set_identity(name, "", key, digest)

    def names(self) -> list[str]:
        """The operator's name, and that of its backward."""
        return [self.name, self.name + BACKWARD_SUFFIX] if self.autograd else [self.name]

    def hooks(self) -> list[tuple[tuple[str, str], str]]:
        """((operator, overload), dispatch key) of everything hooked."""
        return [((name, ""), key) for key in self._keys for name in self.names()]

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if not self._in_worker:
            warn_once(
                f"refused:{self.name}:{reason}",
                f"{self.name} stays uncompiled and is answered by its own function: {reason}.",
                self._function.__code__,
            )

    def note_verdict(self, digest: str, reason: str) -> None:
        """A worker refused the function of that identity, for ``reason``."""
        with self._lock:
            if digest == self._digest and core is not None:
                self._refuse(reason)
                for name, key in self.hooks():
                    core.set_active(name[0], name[1], key, False)

    def replace(self, function: Callable[_P, _R]) -> None:
        """Another function in the place of this one, of the same schema."""
        with self._lock:
            self._function = cast(types.FunctionType, function)
            self._due = not self._in_worker
            if self._keys:
                self.refusal = ""
            self._take_appearance()
        if not self._in_worker and core is not None:
            for name, key in self.hooks():
                core.set_active(name[0], name[1], key, False)

    # ---- on the way to a worker ------------------------------------------------------------------

    def payload(self, digest: str) -> dict[str, Any]:
        """What a worker makes the operator of again. Raises Unfit."""
        from eagercache.callables import function_transfer

        with self._lock:
            if digest != self._digest:
                raise Unfit("the function changed meanwhile")
            if not self._payload:
                self._payload = function_transfer.pack(self._function, self._modules)
            return {
                "name": self.name,
                "schema": self.schema,
                "autograd": self.autograd,
                "codes": sorted(self._codes),
                "pickle": self._payload,
            }


def _itself(function: Any) -> Any:
    return function
