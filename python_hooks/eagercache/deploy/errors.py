"""What can be wrong with an artifact or with what is asked of it, as the core tells it."""

from __future__ import annotations

import os
from typing import Any

from eagercache.base.load import core, usable, why_unavailable


def brief(error: BaseException) -> str:
    """An error in one line, cut off."""
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


def require_core() -> Any:
    """The core. Raises DeployError where there is none."""
    if not usable():
        raise DeployError(why_unavailable(), "unsupported")
    return core


def asked(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the core answers. Its errors become DeployError."""
    assert core is not None
    try:
        return function(*args, **kwargs)
    except core.StoreError as error:
        raise DeployError(str(error), error.code) from None
    except UnicodeError as error:
        raise DeployError(
            f"the artifact holds text that is not UTF-8 ({brief(error)})", "corrupt"
        ) from error


def file_name(path: str | os.PathLike[str]) -> str:
    """A file's name, as the core takes it."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DeployError(
            f"{name!r} is a name that is not UTF-8; use another one", "invalid_argument"
        ) from None
    return name
