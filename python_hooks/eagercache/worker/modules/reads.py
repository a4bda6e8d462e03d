"""What a forward reads of tensors beside their values, which Python code may branch on.

A call's key holds layout, dtype and device of its arguments, and whether they are parameters; that
of a call that needs gradients, for which tensors; and the guard of a module compares the same of
its own, but for whether they are parameters. What else a tensor tells (its version, whether it is
a leaf, attributes that a program gave it) differs between calls of one key: a forward that asks for
it is left alone.

So is one that sets what may be so already where it is watched, and not in another call: which of
the call's tensors need gradients, and their gradients (`self.zero_grad()`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagercache.callables.guard_rows import Path, path_text, step_from
from eagercache.callables.module_identity import Identity, Unfit
from eagercache.callables.used_functions import FunctionRecorder
from eagercache.worker.inductor.commands import CompileRefused

# Attributes that are of the layout, the dtype or the device, or tensors themselves.
_KNOWN = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "names",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
        "data",
        "is_cpu",
        "is_cuda",
        "is_xpu",
        "is_mps",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_mtia",
        "is_xla",
        "is_vulkan",
        "is_ipu",
        "is_maia",
    ]
)
# Methods that tell of a tensor what no key holds, but for what cannot be traced.
_TELLING = frozenset(
    [
        "data_ptr",
        "storage_offset",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "is_pinned",
        "is_shared",
        "is_set_to",
        "is_inference",
        "_is_view",
        "retain_grad",
        "register_hook",
    ]
)
# Attributes that are set, and methods that set such, of a tensor that outlives the call.
_SET = frozenset(["requires_grad", "requires_grad_", "detach_"])


class Reads(TorchFunctionMode):
    """A block in which a forward runs; `check` says afterwards what it read.

    ``tensors`` are the module's and the call's. Which of them need gradients is in the key of a
    call that is traced with ``gradients``. Where these are False no call of the key needs any, and
    where None the key does not say.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, gradients: bool | None) -> None:
        super().__init__()
        self._given = {id(tensor) for tensor in tensors}
        self._known = _KNOWN | {"requires_grad"} if gradients else _KNOWN
        self._set = frozenset() if gradients else _SET
        self._found = ""
        self._changes = False
        # Whether anything may have been computed so that it needs gradients.
        self._records = gradients is not False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = method = getattr(func, "__name__", "")
        if method in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        tells = name not in self._known if method == "__get__" else name in _TELLING
        # `Module.zero_grad` looks whether there is a gradient, and changes it only then.
        sets = name == "grad" or (name in self._set and method != "__get__")
        if sets and args and id(args[0]) in self._given:
            self._changes = True
        self._records = self._records or torch.is_grad_enabled()
        # What is made where no gradients are recorded needs none, whatever it is made of.
        if name == "requires_grad" and not self._records:
            tells = tells and id(args[0]) in self._given
        if tells and not self._found and not _is_of_torch(sys._getframe(1).f_globals):
            self._found = name
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raises Unfit where the forward read, or set, what no key holds."""
        if self._found:
            raise Unfit(f"it reads {self._found} of a tensor, which may differ from call to call")
        if self._changes:
            raise Unfit("it changes more of a tensor than its values")


class ArrayMemory(TorchDispatchMode):
    """A block in which a forward runs that has arrays of numpy; `check` says afterwards.

    A kernel holds their values: it writes into none of them, and what it answers is none of their
    memory. A value that is there already may be written, and leaves no trace but this.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        super().__init__()
        self._ends = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
        self._written = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                self._written = self._written or self._holds(given)
        return func(*args, **kwargs)

    def _holds(self, value: Any) -> bool:
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        starts = [leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.is_cpu]
        return any(low <= start < high for start in starts for low, high in self._ends)

    def check(self, answer: Any) -> None:
        """Raises Unfit where memory of an array was written, or is in the answer."""
        if self._written:
            raise Unfit("it writes into an array of numpy")
        if self._holds(answer):
            raise Unfit("it returns the memory of an array of numpy")


def refuse_array_memory(identity: Identity, run: Callable[[], Any]) -> None:
    """Raises Unfit where ``run`` writes into an array of the module's, or answers with one."""
    if identity.arrays:
        with ArrayMemory(identity.arrays) as memory:
            answer = run()
        memory.check(answer)


def check_names(recorder: FunctionRecorder, attributes: set[str]) -> None:
    """Raises Unfit where code that ran names one of the ``attributes`` that tensors were given."""
    for code, namespace in recorder.all_codes():
        if _is_of_torch(namespace):
            continue
        named = {text for text in (*code.co_names, *code.co_consts) if text in attributes}
        if named:
            raise Unfit(f"{code.co_name} reads {min(named)}, an attribute that a tensor was given")


def refuse_second_way(path: Path | None, module: torch.nn.Module, of_program: bool) -> None:
    """Raises CompileRefused for a tensor of the module that is read where others may stand.

    In a global variable, a class or a default, as no identity has what that is, while a kernel
    takes what the module has. Dynamo has no guard where the module's own was read before.

    ``path``: by which it was read; None where nobody knows one. ``of_program``: from a global.
    """
    if path is None:
        if of_program:
            raise CompileRefused("the forward finds a tensor of its module elsewhere, too")
        return
    owner: Any = module
    is_found = path[0][0] == "self"
    for step, key in path[1:]:
        is_found = is_found and step != "type" and not _is_of_class(owner, key)
        owner = step_from(owner, step, key, module)
    if not is_found:
        raise CompileRefused(f"the forward finds a tensor of its module in {path_text(path)}, too")


def _is_of_class(owner: Any, key: Any) -> bool:
    if not isinstance(owner, torch.nn.Module):
        return False
    groups = (vars(owner), owner._parameters, owner._buffers, owner._modules)
    return not any(key in group for group in groups)


def _is_of_torch(namespace: Mapping[str, Any]) -> bool:
    """Whether code with these global names is PyTorch's own: its answers do not depend on such."""
    return str(namespace.get("__name__", "")).partition(".")[0] == "torch"
