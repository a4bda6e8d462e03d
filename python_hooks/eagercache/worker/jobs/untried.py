"""Kernels that another kind of machine made, before they are used here.

A remote's entry of another kind of machine lies in the store as untried, a miss for every program
(kernel_cache/store/withdrawal.h). The worker that is asked for its key proves that kernel on this
machine, as it does one of its own, and publishes the entry anew; nothing is lowered or compiled.
Where it does not prove, or cannot be tried, it is left, and the call is compiled like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagercache.base.log import event
from eagercache.base.machine_kind import MACHINE, MADE_ON, UNTRIED, VALUES_AND_TIMES, kind_for
from eagercache.worker.inductor.compile import Lowered
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.jobs.outcome import Built, Outcome

# What a proof must know of a kernel's text: facts of these names are "1" where it is so.
TEXT_FACTS = ("reduces", "calls_functions", "approximates")
_ORIGIN = ("bundle", "signer", "expires")  # kernel_cache/store/withdrawal.cc


@dataclass(frozen=True)
class Untried:
    """An untried entry with files of its objects, each of which was checked."""

    manifest: Mapping[str, Any]
    objects: tuple[tuple[str, str], ...]

    @property
    def facts(self) -> Mapping[str, str]:
        """Of the entry."""
        facts: Mapping[str, str] = self.manifest["facts"]
        return facts

    @property
    def times(self) -> bool:
        """Whether which side is faster is to be measured here, too."""
        return self.facts.get(UNTRIED) == VALUES_AND_TIMES

    def built(self, forms: tuple[str, ...]) -> Built | None:
        """The kernel as one that was built here; None where it is of none of these forms."""
        form, facts = self.facts.get("form", ""), self.facts
        if form not in forms or any(name not in facts for name in TEXT_FACTS):
            return None
        reduces, functions, approximates = (facts[name] == "1" for name in TEXT_FACTS)
        text = GeneratedText(
            num_inputs=0,
            num_outputs=0,
            num_constants=0,
            kernels=tuple(facts.get("kernels", "").split()),
            extern_calls=tuple(facts.get("extern_calls", "").split()),
            uses_proxy_executor=False,
            checks_values=False,
            reduces=reduces,
            calls_functions=functions,
            approximates=approximates,
        )
        lowered = Lowered(text, None, None, facts.get("why_container", ""), {})
        plan, strides = facts.get("launch_plan", ""), facts.get("output_strides", "")
        return Built(self.objects, lowered, form, launch_plan=plan, output_strides=strides)

    def tried(self, outcome: Outcome, facts: Mapping[str, str]) -> dict[str, Any]:
        """The entry to publish: as it came, but for ``facts`` of what was found out here.

        Who signed it and until when it holds stays with it.
        """
        assert outcome.proof is not None
        known = {name: value for name, value in self.facts.items() if name != UNTRIED}
        known[MACHINE] = kind_for(known.get("dispatch_key", "CPU"))
        return {**self.manifest, "facts": {**known, **facts, **origin_of(self.facts)}}


def find_untried(store: Any, digest: str, folder: str) -> Untried | None:
    """A key's untried kernel, if there is one whose files are whole."""
    manifest = store.find_untried(digest)
    if manifest is None or manifest["kind"] != "kernel":
        return None  # a decision that was to be measured here is, from the beginning
    try:
        objects = tuple(
            (str(item["kind"]), str(store.object_file(digest, index, folder)))
            for index, item in enumerate(manifest["objects"])
        )
    except Exception as error:  # evicted, damaged, for another processor
        note_left(manifest, error)
        return None
    return Untried(manifest, objects)


def origin_of(facts: Mapping[str, str]) -> dict[str, str]:
    """Of an entry's facts those that say where its code is from, and until when that may run."""
    known = {name: facts[name] for name in _ORIGIN if name in facts}
    return {MADE_ON: facts.get(MADE_ON) or facts.get(MACHINE) or "unknown", **known}


def note_left(manifest: Mapping[str, Any], why: object) -> None:
    """Says in the log why an entry is not used."""
    facts = manifest["facts"]
    event(
        logging.WARNING,
        "untried_left",
        op=facts.get("op"),
        digest=manifest["key"],
        made_on=facts.get(MADE_ON) or facts.get(MACHINE),
        reason=why,
    )
