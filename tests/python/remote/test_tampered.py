"""A sample of what `scripts/attack --only tampered_remotes` offers 10,000 times: none is taken."""

from __future__ import annotations

import pytest
import tampering
from remote_world import World

pytestmark = pytest.mark.once


def test_nothing_that_was_tampered_with_is_accepted(world: World) -> None:
    outcome = tampering.offer(world, tampering.make_remote(world), 1000, seed=7)
    assert outcome.accepted == [] and outcome.broken == []
    assert sum(outcome.refused.values()) == 1000
    # Every kind of thing was tampered with, and found by its own check.
    kinds = {"object: damaged", "entry: signature", "record: rollback", "list: unreadable list"}
    assert kinds <= set(outcome.refused)
