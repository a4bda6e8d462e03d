"""Bundles: the kernels and decisions of one environment as one signed file.

The file itself is read, written and checked in kernel_cache/store/bundle.h. Here it is decided
whether a machine may use it: what its kernels meet when they run must be as it was where they were
made. What only made them (compiler, linker, Python, code generation) may differ or be missing,
because the signature says who vouches for the result; so an import files them under this machine's
environment.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagercache.base import config, environment, facts, signed_file, store_directory
from eagercache.base.load import core, why_unavailable


class BundleError(ValueError):
    """A bundle, key or store that cannot be used: one line with the reason and the remedy."""


@dataclass(frozen=True)
class BundleInfo(signed_file.SignedFile):
    """What a bundle holds, after all of it was checked.

    Attributes, beside those of every signed file:
        entries: its manifests.
        present: keys that the store had, whose verdicts stay; of an import.
    """

    entries: Sequence[dict[str, Any]]
    present: int = 0

    @property
    def kernels(self) -> int:
        """How many kernels there are; the other entries are decisions for native."""
        return sum(entry["kind"] == "kernel" for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {
            "kernels": self.kernels,
            "decisions": len(self.entries) - self.kernels,
            "present": self.present,
        }
        return self._as_dict("bundle", own)


def _name(path: Path) -> str:
    """A file's name, as the core takes it."""
    if not store_directory.has_utf8_name(path):
        raise BundleError(f"{str(path)!r} has a name that is not UTF-8; use another one")
    return str(path)


def _require_core() -> Any:
    if core is None:
        raise BundleError(why_unavailable())
    return core


def _environment_text(store: Path | None) -> str:
    remembered = facts.Facts(store) if store is not None else facts.Facts()
    return environment.environment_text(cxx=config.read_settings().cxx, facts=remembered)


def keygen(name: Path) -> tuple[Path, Path]:
    """Makes a pair of keys, NAME.pem (private) and NAME.pub; never replaces a file."""
    private, public = name.with_name(f"{name.name}.pem"), name.with_name(f"{name.name}.pub")
    module = _require_core()
    if not private.parent.is_dir():
        raise BundleError(f"there is no folder {private.parent}; make it, or name another place")
    for path in (private, public):
        if os.path.lexists(path):
            raise BundleError(f"{path} is there already and is not replaced; use another NAME")
    try:
        module.make_signing_key(_name(private), _name(public))
    except module.StoreError as error:
        raise BundleError(str(error)) from error
    return private, public


def key_id(public: Path) -> str:
    """A public key's id, 64 hexadecimal digits: what is in a list of revoked keys."""
    module = _require_core()
    try:
        return str(module.public_key(_name(public)))
    except module.StoreError as error:
        raise BundleError(str(error)) from error


def export(
    path: Path,
    *,
    store: Path,
    key: Path,
    expires: datetime.datetime | datetime.timedelta | None = None,
) -> dict[str, Any]:
    """Writes the store's kernels and decisions of this environment, signed with a private key.

    The counts, and the bundle's digest. Raises BundleError.
    """
    module = _require_core()
    if not store.is_dir():
        raise BundleError(f"there is no store at {store}; name one with --dir or EAGERCACHE_DIR")
    text = _environment_text(store)
    try:
        opened = module.Store(_name(store), text, read_only=True, revoked=_revoked(None))
        seconds = signed_file.seconds_of(expires)
        return dict(module.write_bundle(_name(path), opened, text, _name(key), seconds))
    except (module.StoreError, TypeError, ValueError) as error:
        raise BundleError(str(error)) from error


def verify(path: Path, *, keys: Sequence[Path], revoked: Path | None = None) -> BundleInfo:
    """Checks all of a bundle against trusted public keys, and this machine against the bundle.

    ``revoked`` is a list of what is not to be used any more; EAGERCACHE_REVOKED by default.
    """
    return _read(path, keys, None, revoked)[1]


def import_into(
    path: Path, *, store: Path, keys: Sequence[Path], revoked: Path | None = None
) -> BundleInfo:
    """Checks all of a bundle as `verify` does, and only then publishes it into a store."""
    module = _require_core()
    bundle, info = _read(path, keys, store, revoked)
    if info.mismatches:
        raise BundleError(f"{path} cannot be used here: {describe(info.mismatches)}")
    settings = config.read_settings()
    try:
        opened = module.Store(
            _name(store),
            _environment_text(store),
            max_bytes=settings.max_bytes,
            allow_untrusted=settings.allow_untrusted,
            revoked=_revoked(revoked),
        )
        counts = module.import_bundle(bundle, opened)
    except module.StoreError as error:
        raise BundleError(str(error)) from error
    return replace(info, present=counts["present"])


def describe(differing: Sequence[tuple[str, str, str]]) -> str:
    """Mismatches in one line."""
    return "; ".join(
        f"{field} is {ours} and the bundle was made with {theirs}"
        for field, theirs, ours in differing
    )


def _revoked(named: Path | None) -> str:
    """The list that is named, or the setting's, as the core takes it; "" without one."""
    return _name(named.absolute()) if named is not None else config.read_settings().revoked_text


def _read(
    path: Path, keys: Sequence[Path], store: Path | None, revoked: Path | None
) -> tuple[Any, BundleInfo]:
    module = _require_core()
    try:
        bundle = module.read_bundle(_name(path), [_name(key) for key in keys], _revoked(revoked))
    except module.StoreError as error:
        raise BundleError(str(error)) from error
    differing = environment.mismatches(bundle.environment, _environment_text(store))
    return bundle, BundleInfo(
        path,
        bundle.signer,
        bundle.digest,
        signed_file.time_of(bundle.created),
        signed_file.time_of(bundle.expires),
        differing,
        bundle.entries,
    )
