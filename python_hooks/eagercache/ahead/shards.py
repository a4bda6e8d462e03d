"""Parts of a warm-up, one for each of several machines that share no disk and do not talk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (index, number of tasks, the first index) of what job arrays tell their tasks.
_ARRAYS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", ""),
)


class ShardError(ValueError):
    """What is no part of a warm-up; one line with the remedy."""


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count``, counted from 0."""

    index: int
    count: int

    def has(self, digest: str) -> bool:
        """Whether a key is of this part: it is of one of them, whatever else a trace holds."""
        return int(digest[:16], 16) % self.count == self.index


def read_shard(text: str, environ: Mapping[str, str] = os.environ) -> Shard:
    """What "2/8" says, or "auto": the task of a Slurm job array, or of a Kubernetes indexed job.

    Of the latter Kubernetes tells its index alone; JOB_COMPLETIONS has to be set beside it. Raises
    ShardError.
    """
    if text == "auto":
        return _of_array(environ)
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal():
        raise ShardError(f"shard {text!r} is none; use INDEX/COUNT, as 0/8, or auto")
    return _checked(int(index), int(count), text)


def _of_array(environ: Mapping[str, str]) -> Shard:
    for index, count, first in _ARRAYS:
        if index not in environ:
            continue
        words = environ[index], environ.get(count, ""), environ.get(first, "0")
        if not all(word.isdecimal() for word in words):
            raise ShardError(
                f"shard auto: {index}={words[0]!r} and {count}={words[1]!r} name no task; use "
                "INDEX/COUNT, as 0/8"
            )
        number, total, least = map(int, words)
        return _checked(number - least, total, f"auto ({number} of {total} from {least})")
    raise ShardError(
        f"shard auto: neither {_ARRAYS[0][0]} nor {_ARRAYS[1][0]} is set; use INDEX/COUNT, as 0/8"
    )


def _checked(index: int, count: int, text: str) -> Shard:
    if not 0 <= index < count:
        raise ShardError(f"shard {text} is none: the index is from 0 to one below the count")
    return Shard(index, count)
