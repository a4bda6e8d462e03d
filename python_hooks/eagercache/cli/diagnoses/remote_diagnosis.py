"""What `eagercache doctor` says of remotes: whether they answer, and have something for us."""

from __future__ import annotations

from collections.abc import Iterator

from eagercache.base import config
from eagercache.cli.diagnoses.check import Check
from eagercache.remote import catalogue, transfer
from eagercache.remote.place import PlaceError
from eagercache.remote.plan import RemoteError, plan_of
from eagercache.remote.tier import Tier


def remote_checks(text: str) -> Iterator[Check]:
    """One finding for each remote of the environment's settings; ``text`` is the environment key.

    A remote has a few seconds.
    """
    try:
        plan = plan_of(None, config.read_settings())
    except RemoteError as error:
        yield Check("remote", "problem", str(error), "mend EAGERCACHE_REMOTE, _TRUST or _KEY")
        return
    for url in plan.urls if plan is not None else ():
        yield _check(Tier(url), text)


def _check(tier: Tier, text: str) -> Check:
    try:
        what = tier.missing()
        if what is not None:
            return Check("remote", "problem", f"{tier.shown}: {what}", transfer.MISSING_REMEDY)
        count = len(catalogue.keys(tier, catalogue.environment_id(text)))
        others = transfer.unusable(tier, text)
    except PlaceError as error:
        return Check(
            "remote",
            "problem",
            f"{tier.shown} does not answer: {error}",
            "mend it, or take it out of EAGERCACHE_REMOTE; until then kernels are made here",
        )
    said = f"{tier.shown} answers; entries for this environment: {count}"
    for one in others:
        fields = "; ".join(
            f"{field} differs ({theirs} there, {ours} here)" for field, theirs, ours in one.fields
        )
        said += f"; unusable here: {one.entries}, because {fields}"
    return Check("remote", "ok" if count else "note", said)
