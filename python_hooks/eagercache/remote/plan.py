"""Which remotes are asked, whose signature is believed there, and with which key is signed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagercache.base import config, store_directory
from eagercache.base.load import core
from eagercache.remote.place import BadUrl, check_url

PathLike = str | os.PathLike[str]


class RemoteError(ValueError):
    """A remote or a key that cannot be used: one line with the reason and the remedy."""


@dataclass(frozen=True)
class Remote:
    """Remotes, for `enable(remote=...)`, with the keys that hold for them.

    Attributes:
        urls: one URL or several, which are asked in order; EAGERCACHE_REMOTE has the same.
        trust: the public key, or keys, whose entries are believed. By default
            EAGERCACHE_REMOTE_TRUST.
        key: a private key. With one, what is compiled here is signed and sent to the remotes, and
            what it has signed is believed, too. By default EAGERCACHE_REMOTE_KEY.
        retime: whether what another kind of machine measured is measured here before it counts. By
            default EAGERCACHE_REMOTE_RETIME.
    """

    urls: str | Sequence[str]
    trust: PathLike | Sequence[PathLike] = ()
    key: PathLike | None = None
    retime: bool | None = None


@dataclass(frozen=True)
class RemotePlan:
    """Remotes whose URLs and keys were found to be usable.

    Attributes:
        urls: in the order in which they are asked.
        trusted: public keys, in hexadecimal digits.
        key: the file of a private key; None: nothing is sent.
        revoked: the list of what is not to be believed any more (EAGERCACHE_REVOKED); "": none.
        retime: whether another kind of machine's measurements are repeated here.
    """

    urls: tuple[str, ...]
    trusted: tuple[str, ...]
    key: str | None = None
    revoked: str = ""
    retime: bool = False


def plan_of(remote: Any, settings: config.Settings) -> RemotePlan | None:
    """The plan of what `enable(remote=...)` was given; of the environment's settings for None.

    None where there is no remote. Reads the files of keys. Raises RemoteError.
    """
    if not isinstance(remote, Remote):
        remote = Remote(settings.remote if remote is None else remote)
    urls = _urls(remote.urls)
    if not urls:
        return None
    trust = _paths(remote.trust) or settings.remote_trust
    key = settings.remote_key
    if remote.key is not None:
        if not isinstance(remote.key, (str, os.PathLike)):
            raise RemoteError(f"key={remote.key!r} is no file of a private key")
        key = Path(remote.key)
    trusted = [_public_key(path) for path in trust]
    if key is not None:
        trusted.append(_public_key(key, of_signer=True))
    if not trusted:
        raise RemoteError(
            f"remote {urls[0]!r}: no key is trusted; name the public key of who fills it in "
            "EAGERCACHE_REMOTE_TRUST (`eagercache bundle keygen` makes a pair)"
        )
    signs = str(key.absolute()) if key else None
    retime = settings.remote_retime if remote.retime is None else bool(remote.retime)
    trusted_once = tuple(dict.fromkeys(trusted))
    return RemotePlan(urls, trusted_once, signs, settings.revoked_text, retime)


def _urls(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        names: list[Any] = given.replace(",", " ").split()
    elif isinstance(given, Iterable):
        names = list(given)
    else:
        names = [given]
    for name in names:
        if not isinstance(name, str):
            raise RemoteError(f"remote={given!r} is no URL, list of URLs or eagercache.Remote")
        try:
            check_url(name)
        except BadUrl as error:
            raise RemoteError(str(error)) from error
    return tuple(dict.fromkeys(names))


def _paths(given: Any) -> tuple[Path, ...]:
    names = (given,) if isinstance(given, (str, os.PathLike)) else given
    if isinstance(names, Iterable):
        paths = tuple(names)
        if all(isinstance(one, (str, os.PathLike)) for one in paths):
            return tuple(Path(one) for one in paths)
    raise RemoteError(f"trust={given!r} is no file of a public key, or list of such files")


def _public_key(path: Path, *, of_signer: bool = False) -> str:
    """The public key in a file; or, ``of_signer``, that of the private key in it."""
    assert core is not None
    read = core.public_key_of_signer if of_signer else core.public_key
    try:
        return str(read(_name(path)))
    except core.StoreError as error:
        raise RemoteError(f"a remote's key: {error}") from error


def _name(path: Path) -> str:
    if not store_directory.has_utf8_name(path):
        raise RemoteError(f"{str(path)!r} has a name that is not UTF-8; use another one")
    return str(path)
