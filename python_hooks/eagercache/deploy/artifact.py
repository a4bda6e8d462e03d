"""Modules with their weights, deployed: one signed file that answers calls without the module.

`load_module` opens what `export_module` (or ``eagercache bundle export --with-weights``) wrote. The
format is in kernel_cache/FORMAT.md; programs without Python open the same file with
``eagercache/deployed_module.h``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.base.signed_file import SignedFile, time_of
from eagercache.deploy.deployed_module import DeployedModule
from eagercache.deploy.errors import DeployError, asked, brief, file_name, require_core
from eagercache.deploy.tensors import ConstantInfo, constants_of


def load_module(
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str | os.PathLike[str]],
    mmap: bool = True,
    verify_weights: bool = False,
    runners: int = 0,
    revoked: str | os.PathLike[str] | None = None,
    device: torch.device | str | int | None = None,
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
        device: of a module that was exported on a GPU, the GPU that it runs on, of the same kind as
            that one; the current one by default. One that was exported on the CPU runs there.

    Raises:
        DeployError: what is wrong, in one line.
    """
    from eagercache.base import config
    from eagercache.base.environment import running_text

    module = require_core()
    return DeployedModule(
        asked(
            module.DeployedProgram.open,
            file_name(path),
            [file_name(key) for key in keys],
            running_text(),
            copy=not mmap,
            verify=verify_weights,
            allow_untrusted=config.read_settings().allow_untrusted,
            runners=runners,
            revoked=_revoked(revoked),
            device=_device_text(device),
        )
    )


def _device_text(device: torch.device | str | int | None) -> str:
    """A device as the core takes it. Raises DeployError for what is none."""
    if device is None:
        return ""
    try:
        return str(
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        )
    except (RuntimeError, TypeError) as error:
        raise DeployError(f"{device!r} is no device ({brief(error)})", "invalid_argument") from None


@dataclass(frozen=True)
class ArtifactInfo(SignedFile):
    """What an artifact says of itself, after it was checked.

    Attributes:
        signer: the public key that signed it, in hexadecimal digits. It is the key's id.
        digest: the artifact's, in hexadecimal digits, by which it can be revoked.
        created: when it was made.
        expires: when it stops to be of use; None: never.
        mismatches: why this machine cannot use it: (field, the artifact's value, this machine's).
        bytes: of the file.
    """

    facts: dict[str, str]
    constants: tuple[ConstantInfo, ...]
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        constants = [
            {
                "name": c.name,
                "kind": c.kind,
                "dtype": str(c.dtype).removeprefix("torch."),
                "sizes": list(c.sizes),
            }
            for c in self.constants
        ]
        facts = {name: value for name, value in self.facts.items() if name != "program"}
        return self._as_dict(
            "artifact", {"bytes": self.bytes, "facts": facts, "constants": constants}
        )


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a module's artifact."""
    return core is not None and bool(core.is_module_artifact(file_name(path)))


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
    module = require_core()
    row = asked(
        module.read_module_artifact,
        file_name(path),
        [file_name(key) for key in keys],
        verify=True,
        revoked=_revoked(revoked),
    )
    try:
        return _info_of(Path(path), row, module.host_cpu_features())
    except Exception as error:  # a header that is signed may still be anything
        raise DeployError(
            f"{path} describes itself in a malformed way ({brief(error)}); export it again",
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
            *_other_gpus(row["facts"].get("gpu", "")),
        ),
        facts=dict(row["facts"]),
        constants=constants_of(row["constants"]),
        bytes=row["bytes"],
    )


def _other_gpus(wanted: str) -> Iterator[tuple[str, str, str]]:
    """A row of `ArtifactInfo.mismatches` where no GPU here is of the kind that is ``wanted``."""
    assert core is not None
    count = torch.cuda.device_count() if wanted else 0
    here = sorted({str(core.cuda_architecture(index)) for index in range(count)})
    if wanted and wanted not in here:
        yield "gpu", wanted, ", ".join(here) or "(missing)"


def _revoked(named: str | os.PathLike[str] | None) -> str:
    """The list that is named, or the setting's, as the core takes it; "" without one."""
    from eagercache.base import config

    return file_name(named) if named is not None else config.read_settings().revoked_text
