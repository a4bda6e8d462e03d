"""Modules with their weights, deployed: one signed file that answers calls without the module.

`load_module` opens what `export_module` (or ``eagercache bundle export --with-weights``) wrote. The
format is in kernel_cache/FORMAT.md; programs without Python open the same file with
``eagercache/deployed_module.h``.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.base.load import core
from eagercache.base.signed_times import time_of
from eagercache.calls.storage import extent

_KINDS = ("parameter", "buffer", "folded")
_WAIT, _TRY, _ALONE = range(3)


_PLAIN = (bool, int, float, str, type(None))


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class DeployError(ValueError):
    """An artifact, or what is asked of it, cannot be used: one line with the reason.

    Attributes:
        code: "refused" (unknown signer, altered, expired, revoked), "corrupt" (cut off, damaged),
            "incompatible" (another environment, machine or version), "invalid_argument" (inputs or
            constants that do not fit), "not_found", "unsupported" and other names of what may be
            wrong with files.
    """

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class TensorInfo:
    """An input or an output of a deployed module.

    Attributes:
        sizes: of an input, None where any size is taken for which the module was compiled; of an
            output those of the call that was exported.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class ConstantInfo:
    """A constant of a deployed module.

    Attributes:
        name: as in the module's ``state_dict()``.
        kind: "parameter", "buffer", or "folded": computed from others, and never given.
        aliases: other names of the same tensor.
    """

    name: str
    kind: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Of memory, between its first and behind its last element."""
        return self.dtype.itemsize * extent(self.sizes, self.strides)


def load_module(
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str | os.PathLike[str]],
    mmap: bool = True,
    verify_weights: bool = False,
    runners: int = 0,
    revoked: str | os.PathLike[str] | None = None,
) -> DeployedModule:
    """Opens an artifact. Nothing is compiled, and the module's classes are not needed.

    The signature (Ed25519, by one of ``keys``, PEM files with public keys), the header and the code
    are always checked before anything is loaded, and so is whether this process is what the code
    was made for, when it expires, and that neither it nor its key is revoked.

    Args:
        path: the artifact.
        keys: of those whose artifacts are trusted.
        mmap: the weights are mapped: they cost no time now and no memory of this process alone, and
            all processes that map the file share its pages. The file must belong to root or this
            user and be writable by nobody else (``EAGERCACHE_ALLOW_UNTRUSTED=1`` admits it), and
            must not be written as long as it is used; a new file may take its name. False: they are
            read into memory and every one is compared with its digest.
        verify_weights: with ``mmap``, reads and compares all of them first.
        runners: how many calls may run at a time; 0: as many as there are processors.
        revoked: a file of keys and artifacts that are not to be used any more, one a line, as
            `verify_module` tells them; EAGERCACHE_REVOKED by default. A list that cannot be read
            refuses everything.

    Raises:
        DeployError: what is wrong, in one line.
    """
    from eagercache.base import config
    from eagercache.base.environment import running_text

    module = _require_core()
    return DeployedModule(
        _asked(
            module.DeployedProgram.open,
            _name(path),
            [_name(key) for key in keys],
            running_text(),
            copy=not mmap,
            verify=verify_weights,
            allow_untrusted=config.read_settings().allow_untrusted,
            runners=runners,
            revoked=_revoked(revoked),
        )
    )


class DeployedModule:
    """A module with its weights, compiled. `load_module` makes it. All methods are thread-safe.

    Calls run without gradients, in several threads at a time, with the interpreter lock released.
    Each is computed with one whole version of the constants. There are two sets of them: the active
    one answers; the inactive one, which comes into being with its first update, can be changed at
    leisure and then be swapped in. No call waits for an update, a swap or a fold: they make a new
    version beside the old one, which lives until its last call has ended.
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
                f"the artifact's description of its calls is malformed ({_brief(error)}); "
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
        outputs, version = _asked(self._program.run, list(inputs), place)
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
        return _constants_of(self._program.constants)

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
        return dict(_asked(self._program.values, inactive, False))

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
        _asked(self._program.update, dict(values), inactive, whole, not copy)

    def swap_constants(self) -> None:
        """The inactive set answers from now on; the other becomes the inactive one.

        Raises DeployError ("not_found") without an inactive set.
        """
        _asked(self._program.swap)

    def fold_constants(self, *, inactive: bool = False) -> None:
        """Computes folded constants anew.

        Updates do that by themselves: this is for tensors that were given with ``copy=False`` and
        written since, and to have the work done before `swap_constants`.
        """
        _asked(self._program.fold, inactive)

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
            f"{len(self.constants)} constants)"
        )


@dataclass(frozen=True)
class ArtifactInfo:
    """What an artifact says of itself, after it was checked.

    Attributes:
        signer: the public key that signed it, in hexadecimal digits. It is the key's id.
        digest: the artifact's, in hexadecimal digits, by which it can be revoked.
        created: when it was made.
        expires: when it stops to be of use; None: never.
        mismatches: why this machine cannot use it: (field, the artifact's value, this machine's).
        bytes: of the file.
    """

    path: Path
    signer: str
    digest: str
    created: datetime.datetime | None
    expires: datetime.datetime | None
    mismatches: tuple[tuple[str, str, str], ...]
    facts: dict[str, str]
    constants: tuple[ConstantInfo, ...]
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            "signer": self.signer,
            "digest": self.digest,
            "created": self.created.isoformat() if self.created else None,
            "expires": self.expires.isoformat() if self.expires else None,
            "bytes": self.bytes,
            "facts": {name: value for name, value in self.facts.items() if name != "program"},
            "constants": [
                {
                    "name": c.name,
                    "kind": c.kind,
                    "dtype": str(c.dtype).removeprefix("torch."),
                    "sizes": list(c.sizes),
                }
                for c in self.constants
            ],
            "mismatches": [
                {"field": field, "artifact": theirs, "here": ours}
                for field, theirs, ours in self.mismatches
            ],
        }


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a module's artifact."""
    return core is not None and bool(core.is_module_artifact(_name(path)))


def verify_module(
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str | os.PathLike[str]],
    revoked: str | os.PathLike[str] | None = None,
) -> ArtifactInfo:
    """Reads and checks all of an artifact, every weight too. Loads and runs nothing of it.

    Raises DeployError for one that is not whole, or not signed by one of ``keys``, has expired or
    is ``revoked`` (see `load_module`).
    """
    module = _require_core()
    row = _asked(
        module.read_module_artifact,
        _name(path),
        [_name(key) for key in keys],
        verify=True,
        revoked=_revoked(revoked),
    )
    try:
        return _info_of(Path(path), row, module.host_cpu_features())
    except Exception as error:  # a header that is signed may still be anything
        raise DeployError(
            f"{path} describes itself in a malformed way ({_brief(error)}); export it again",
            "corrupt",
        ) from error


def _info_of(path: Path, row: Mapping[str, Any], features: Iterable[str]) -> ArtifactInfo:
    from eagercache.base.environment import mismatches, running_text

    missing = set(row["cpu_features"]) - set(features)
    return ArtifactInfo(
        path=path,
        signer=row["signer"],
        digest=row["digest"],
        created=time_of(row["created"]),
        expires=time_of(row["expires"]),
        mismatches=(
            *mismatches(row["environment"], running_text()),
            *(("cpu.features", name, "(missing)") for name in sorted(missing)),
        ),
        facts=dict(row["facts"]),
        constants=_constants_of(row["constants"]),
        bytes=row["bytes"],
    )


def _constants_of(rows: Iterable[Any]) -> tuple[ConstantInfo, ...]:
    """Of the core's rows: names, number of the kind, dtype, sizes, strides."""
    return tuple(
        ConstantInfo(
            names[0],
            _KINDS[kind],
            getattr(torch, dtype),
            tuple(sizes),
            tuple(strides),
            tuple(names[1:]),
        )
        for names, kind, dtype, sizes, strides in rows
    )


def _require_core() -> Any:
    if core is None:
        raise DeployError("eagercache works on Linux x86-64 only", "unsupported")
    return core


def _asked(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the core answers. Its errors become DeployError."""
    assert core is not None
    try:
        return function(*args, **kwargs)
    except core.StoreError as error:
        raise DeployError(str(error), error.code) from None
    except UnicodeError as error:
        raise DeployError(
            f"the artifact holds text that is not UTF-8 ({_brief(error)})", "corrupt"
        ) from error


def _revoked(named: str | os.PathLike[str] | None) -> str:
    """The list that is named, or the setting's, as the core takes it; "" without one."""
    from eagercache.base import config

    return _name(named) if named is not None else config.read_settings().revoked_text


def _name(path: str | os.PathLike[str]) -> str:
    """A file's name, as the core takes it."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DeployError(
            f"{name!r} is a name that is not UTF-8; use another one", "invalid_argument"
        ) from None
    return name


def _seconds(timeout: float | None) -> float:
    return 1e8 if timeout is None else timeout


def _build_unflatten(text: str) -> Any:
    from eagercache.callables.outputs import build_unflatten

    count = sum("tensor" in leaf for leaf in json.loads(text)["leaves"])
    build = build_unflatten(text, count)
    return build if build is not None else lambda outputs: outputs[0]
