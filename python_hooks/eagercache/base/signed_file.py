"""Signed files, bundles and artifacts: what both say of themselves, and when they expire.

Times are seconds since 1970 where the core takes them.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOREVER = 0  # an expiry that never comes


@dataclass(frozen=True)
class SignedFile:
    """What a signed file says of itself, after it was checked.

    Attributes:
        signer: the public key that signed it, in hexadecimal digits. It is the key's id.
        digest: the file's, in hexadecimal digits, by which it can be revoked.
        created: when it was made.
        expires: when it stops to be of use; None: never.
        mismatches: why this machine cannot use it: (field, the file's value, this machine's).
    """

    path: Path
    signer: str
    digest: str
    created: datetime.datetime | None
    expires: datetime.datetime | None
    mismatches: tuple[tuple[str, str, str], ...]

    def _as_dict(self, kind: str, own: dict[str, Any]) -> dict[str, Any]:
        """For JSON, with what is the file's ``own``; ``kind`` is what its side is called."""
        return {
            "path": str(self.path),
            "signer": self.signer,
            "digest": self.digest,
            "created": self.created.isoformat() if self.created else None,
            "expires": self.expires.isoformat() if self.expires else None,
            **own,
            "mismatches": [
                {"field": field, kind: theirs, "here": ours}
                for field, theirs, ours in self.mismatches
            ],
        }


def seconds_of(expires: datetime.datetime | datetime.timedelta | None) -> int:
    """An expiry as the core takes it. A duration counts from now, a naive time is local.

    Raises TypeError for what is none of these, ValueError for no time that a file can have.
    """
    if expires is None:
        return _FOREVER
    if isinstance(expires, datetime.timedelta):
        seconds = time.time() + expires.total_seconds()
    elif isinstance(expires, datetime.datetime):
        seconds = expires.timestamp()
    else:
        raise TypeError(f"expires={expires!r} is not a datetime, a timedelta or None")
    if seconds < 1:
        raise ValueError(f"expires={expires!r} is not after 1970")
    return int(seconds)


def time_of(seconds: int) -> datetime.datetime | None:
    """The time, in UTC. None for never, and for what no calendar has."""
    if seconds == _FOREVER:
        return None
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (OverflowError, OSError, ValueError):
        return None


def parse_expiry(text: str) -> datetime.datetime | datetime.timedelta:
    """What "2027-01-31" (its beginning in UTC), "2027-01-31T12:00+00:00" or "90d" says.

    Raises ValueError for another text.
    """
    if text.endswith("d") and text[:-1].isdigit() and len(text) < 7:
        return datetime.timedelta(days=int(text[:-1]))
    found = datetime.datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.timezone.utc)
