"""Remotes whose entries, objects and signed lists were tampered with."""

from __future__ import annotations

import tampering
from remote_world import World

from attack.arena import Arena, Row

_WHOLE, _QUICK = 10_000, 2_000


def tampered_remotes(arena: Arena) -> Row:
    """None is accepted, none hangs, and none is more than one refusal."""
    row = Row("entries, objects and lists of remotes, altered, exchanged or gone")
    folder = arena.new_folder()
    folder.chmod(0o700)
    world = World(folder)
    count, seed = _QUICK if arena.quick else _WHOLE, arena.random.randrange(1 << 31)
    outcome = tampering.offer(world, tampering.make_remote(world), count, seed)
    row.tried = sum(outcome.refused.values()) + len(outcome.accepted) + len(outcome.broken)
    row.foreign, row.died = len(outcome.accepted), len(outcome.broken)
    refused = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.refused.items()))
    row.note = "; ".join([*outcome.accepted[:1], *outcome.broken[:1]]) or f"refused: {refused}"
    return row


SCENES = (tampered_remotes,)
