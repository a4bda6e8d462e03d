"""When signed files were made and expire: seconds since 1970, as the core takes them, and texts."""

from __future__ import annotations

import datetime
import time

_FOREVER = 0  # an expiry that never comes


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
