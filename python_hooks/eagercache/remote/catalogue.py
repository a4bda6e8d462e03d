"""What lies where in a remote, and its lists of what is there.

    v1/o/SHA256.KIND                an object, named by its content
    v1/ENVIRONMENT/e/KEY            a signed entry (kernel_cache/store/signed_entry.h)
    v1/ENVIRONMENT/i/SIGNER         what is newest of a signer's, signed (indices.py)
    v1/ENVIRONMENT/keys             keys of entries, one a line
    v1/ENVIRONMENT/environment      the text whose hash ENVIRONMENT is
    v1/environments                 the ENVIRONMENTs, one a line

An entry is found by its name alone. The last three are hints for `eagercache pull` and `doctor`:
nobody signs them, and of two machines that write a list at the same time one may lose its lines,
which its next `eagercache push` puts back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from eagercache.base import environment
from eagercache.remote.place import PlaceError
from eagercache.remote.tier import Tier

ENVIRONMENTS = "v1/environments"
KEY_LINE_BYTES = 65  # of the list of keys, whose lines are sorted

_MOST_LIST_BYTES = 16 << 20
_MOST_TEXT_BYTES = 64 << 10
_MOST_ENVIRONMENTS = 100  # each costs who looks at them two requests
_KEY = re.compile(r"[0-9a-f]{64}")
_ENVIRONMENT = re.compile(r"[0-9a-f]{16}")


def environment_id(text: str) -> str:
    """Names the folder of all machines that share kernels with that of this environment key."""
    return hashlib.sha256(environment.shared_text(text).encode()).hexdigest()[:16]


def entry_name(identity: str, key: str) -> str:
    """The name of a key's entry."""
    return f"v1/{identity}/e/{key}"


def object_name(item: Mapping[str, Any]) -> str:
    """The name of one of an entry's objects."""
    return f"v1/o/{item['digest']}.{item['kind']}"


def keys(tier: Tier, identity: str) -> list[str]:
    """The keys that the remote lists for an environment, sorted.

    Raises PlaceError, also for what is no list: a server that answers everything, with a page to
    log in say, must not pass for an empty remote.
    """
    return _list(tier, f"v1/{identity}/keys", _KEY)


def key_lines(tier: Tier, identity: str) -> bytes:
    """The same as it lies there, unchecked. Raises PlaceError."""
    return tier.get(f"v1/{identity}/keys", _MOST_LIST_BYTES) or b""


def environments(tier: Tier) -> list[str]:
    """The environments that the remote lists, sorted; not too many. Raises PlaceError."""
    return _list(tier, ENVIRONMENTS, _ENVIRONMENT)[:_MOST_ENVIRONMENTS]


def text_of(tier: Tier, identity: str) -> str | None:
    """The text of an environment that the remote lists; None where it has no right one.

    Raises PlaceError.
    """
    content = tier.get(f"v1/{identity}/environment", _MOST_TEXT_BYTES)
    text = (content or b"").decode("ascii", errors="replace")
    return text if content and text.isascii() and environment_id(text) == identity else None


def add_keys(tier: Tier, text: str, more: Collection[str]) -> None:
    """Adds keys of an environment, whose text this is, to the remote's lists. Raises PlaceError."""
    identity = environment_id(text)
    listed = _list(tier, f"v1/{identity}/keys", _KEY, mends=True)
    if not set(more) <= set(listed):
        _put(tier, f"v1/{identity}/keys", {*listed, *more})
    if text_of(tier, identity) is None:
        shared = environment.shared_text(text).encode("ascii", errors="replace")
        tier.put(f"v1/{identity}/environment", shared)
    known = _list(tier, ENVIRONMENTS, _ENVIRONMENT, mends=True)
    if identity not in known:
        _put(tier, ENVIRONMENTS, {*known, identity})


def _list(tier: Tier, name: str, form: re.Pattern[str], *, mends: bool = False) -> list[str]:
    """``mends``: what is no list is about to be replaced by one."""
    content = tier.get(name, _MOST_LIST_BYTES)
    lines = (content or b"").decode("ascii", errors="replace").split("\n")
    rows = sorted({line for line in lines if form.fullmatch(line)})
    if content is not None and not rows and not mends:
        raise PlaceError(f"what it has at {name} is no list; is this a remote of eagercache's?")
    return rows


def _put(tier: Tier, name: str, lines: Collection[str]) -> None:
    tier.put(name, "".join(f"{line}\n" for line in sorted(lines)).encode())
