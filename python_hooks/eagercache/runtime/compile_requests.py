"""The way of a key to be compiled from the core to the compile service, and of its verdict back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagercache.base import config
from eagercache.base.entry_facts import SEARCH
from eagercache.base.load import core
from eagercache.runtime import differences
from eagercache.runtime.session import Configuration, session

if TYPE_CHECKING:
    from eagercache.remote.plan import RemotePlan


def start_service(
    settings: config.Settings,
    store: Any,
    environment_text: str,
    chosen: Configuration,
    remote: RemotePlan | None,
) -> None:
    """Plugs the compile service into the core; it and its workers start with the first compile."""
    assert core is not None
    session.configure_service(
        store_root=store.root,
        environment=environment_text,
        choose=chosen.choose,
        numerics=chosen.numerics,
        search=settings.search,
        workers=settings.workers,
        slots=settings.slots,
        cxx=settings.cxx,
        awaited=chosen.on_miss == "wait",
        max_bytes=settings.max_bytes,
        allow_untrusted=settings.allow_untrusted,
        remote=None if store.read_only else remote,
        revoked=settings.revoked_text,
    )
    session.linger = settings.linger
    core.set_handler(_submit, _put_aside)


def _put_aside(digest: str, reason: str) -> None:
    """Called by the core on the thread of a call whose answer was wrong."""
    differences.note(digest, reason)


def _submit(call_json: str) -> None:
    """Called by the core's loader thread for a key to compile. Queues and returns."""
    assert core is not None
    from eagercache.service import cuda_gate
    from eagercache.service.request import cpu_seconds

    description = json.loads(call_json)
    on_gpu = description["dispatch_key"] == "CUDA"
    gpu = cuda_gate.gpu_of(description) if on_gpu else 0
    active = session.cuda_compile_service(gpu) if on_gpu else session.compile_service()
    if active is None:
        core.complete(description["digest"], "native", "the compile service is closed")
        return
    if description.get("again") == SEARCH and active.settings.search == "off":
        core.complete(description["digest"], "kernel", "")  # what the store has stays
        return
    refusal = _describe_function(description)
    if refusal:
        core.complete(description["digest"], "native", refusal)
        return
    if on_gpu:
        reason = cuda_gate.reason_to_stay_off(description, core)
        description = cuda_gate.on_first_gpu(description)
        if reason:
            active.keep_for_later(description)
            core.complete(description["digest"], "native", reason)
            return

    def done(response: Mapping[str, Any]) -> None:
        assert core is not None
        try:
            _note_refusal(description, response)
        finally:  # somebody may be waiting for it
            core.complete(
                description["digest"],
                str(response.get("verdict", "failed")),
                str(response.get("reason", "")),
                cpu_seconds(response),
            )

    active.submit(description, done)


def _describe_function(description: dict[str, Any]) -> str:
    """Adds to a request what a worker makes the operator's function of; why it cannot, or ""."""
    if description["op"].startswith("aten::"):
        return ""
    from eagercache.callables import custom_operators
    from eagercache.callables.module_identity import Unfit

    operator = custom_operators.find(description["op"])
    if operator is None:
        return "its code is not known: neither eagercache.op nor torch.library.custom_op made it"
    try:
        description["function"] = operator.payload(description.get("identity", ""))
    except Unfit as error:
        return str(error)
    return ""


def _note_refusal(description: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    if "function" in description and response.get("refused"):
        from eagercache.callables import custom_operators

        operator = custom_operators.find(description["op"])
        if operator is not None:
            operator.note_verdict(description["identity"], str(response.get("reason", "")))
