"""Parts of a warm-up."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from eagercache.ahead.shards import Shard, ShardError, read_shard


def test_each_key_is_of_one_part_and_parts_are_about_equal() -> None:
    digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(4000)]
    parts = [[one for one in digests if Shard(index, 8).has(one)] for index in range(8)]
    assert sorted(itertools.chain(*parts)) == sorted(digests)
    assert all(400 < len(part) < 600 for part in parts)


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("0/1", {}, Shard(0, 1)),
        ("2/8", {"SLURM_ARRAY_TASK_ID": "5"}, Shard(2, 8)),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_MIN": "1",
            },
            Shard(2, 4),
        ),
        ("auto", {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "3"}, Shard(0, 3)),
    ],
)
def test_parts_are_named_or_those_of_a_job_array(
    text: str, environ: dict[str, str], expected: Shard
) -> None:
    assert read_shard(text, environ) == expected


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        *((text, {}) for text in ("", "1", "8/8", "-1/8", "0/0", "1/2/3", "a/b", "auto", "²/8")),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}),
        ("auto", {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "4"}),
    ],
)
def test_what_is_no_part_is_one_line_with_the_remedy(text: str, environ: dict[str, str]) -> None:
    with pytest.raises(ShardError) as raised:
        read_shard(text, environ)
    assert "\n" not in str(raised.value) and "shard" in str(raised.value)
