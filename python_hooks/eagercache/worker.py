"""The compile worker: ``python -m eagercache.worker PARENT_PID``.

A persistent process of its own session that reads requests from its standard input and answers on a
private duplicate of its standard output. Both carry frames: four bytes of length, little-endian,
then JSON. Whatever libraries print to file descriptor 1 goes to standard error and cannot break a
frame.

It exits at the end of its input, and takes its whole process group (compilers included) with it
when its parent is gone. It is the only place where a fresh kernel runs before it is proved: a crash
or a hang here is an answer, not an accident.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import Call
    from .compile import CompiledKernel, Tools
    from .prove import Native, Proof
    from .timing import Timing

MAX_FRAME_BYTES = 64 << 20
NICENESS = 10
TRANSIENT_RETRY_SECONDS = 600
DEFAULT_MAX_BYTES = 10 << 30
EVICTION_SECONDS = 600.0  # at most this often, by one worker
_PARENT_CHECK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next frame, or None at the end of the stream. Raises ValueError on a malformed one."""
    head = _read_exactly(stream, 4)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    body = _read_exactly(stream, length)
    if body is None:
        return None
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("a frame that is not an object")  # noqa: TRY004 - it is the data
    return frame


def _read_exactly(stream: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count > 0:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_frame(stream: IO[bytes], frame: Mapping[str, Any]) -> None:
    """Writes one frame and flushes."""
    body = json.dumps(frame).encode()
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


@dataclass
class Outcome:
    """What became of one request, before it is published."""

    verdict: str  # "kernel", "native", "failed" or "busy"
    reason: str = ""
    transient: bool = False
    compiled: CompiledKernel | None = None
    proof: Proof | None = None
    timing: Timing | None = None
    published: bool = False  # somebody else's entry was found
    output_strides: str = ""  # native's, as JSON; for a container
    launch_plan: str = ""  # for a bare kernel
    seconds: dict[str, float] = field(default_factory=dict)


class _Failure(Exception):
    """Ends a request. ``transient``: may be tried again later."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient


class Worker:
    """Serves requests one after the other. Bound to the thread that made it."""

    def __init__(self) -> None:
        from . import environment
        from ._load import core

        if core is None:
            raise RuntimeError("eagercache does not work on this platform")
        self._core: Any = core
        self._environment = environment
        self._stores: dict[tuple[str, str], Any] = {}
        self._scratch: Path | None = None
        self._tools: Tools | None = None
        self._clock = _Clock()
        self._last_eviction = -EVICTION_SECONDS

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The response to one request. Never raises for what the request asks."""
        description = request["description"]
        self._clock = _Clock()
        try:
            outcome = self._serve(request)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            outcome = Outcome("failed", _one_line(error), transient=_is_transient(error))
        outcome.seconds = self._clock.seconds
        response: dict[str, Any] = {
            "id": description.get("id"),
            "digest": description.get("digest"),
            "verdict": outcome.verdict,
            "reason": outcome.reason,
            "failure": "transient" if outcome.transient else "deterministic",
            "found": outcome.published,
            "seconds": outcome.seconds,
        }
        if outcome.proof is not None:
            response["numerics"] = outcome.proof.numerics
        if outcome.timing is not None:
            response["native_ns"] = outcome.timing.native_ns
            response["kernel_ns"] = outcome.timing.kernel_ns
        return response

    def close(self) -> None:
        """Removes the private folder."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _serve(self, request: Mapping[str, Any]) -> Outcome:
        description = request["description"]
        store = self._store(request)
        if "record" in request:
            outcome = Outcome(
                "failed",
                str(request["record"]["reason"]),
                transient=request["record"]["failure"] == "transient",
            )
            self._publish(request, store, outcome)
            return outcome
        lock = store.try_lock(description["digest"])
        if lock is None:
            return Outcome("busy", "another process compiles this call")
        try:
            # Whoever held the lock before may have published in the meantime.
            entry = store.find(description["digest"])
            if entry is not None:
                return Outcome(
                    entry["kind"], entry.get("facts", {}).get("reason", ""), published=True
                )
            return self._make(request, store)
        finally:
            lock.release()

    def _store(self, request: Mapping[str, Any]) -> Any:
        key = (request["store_root"], request["environment"])
        if key not in self._stores:
            own = self._environment.environment_text(cxx=request.get("cxx"))
            differing = self._environment.diff(own, request["environment"])
            if differing:
                raise _Failure(
                    f"the worker's environment differs in {', '.join(differing)}", transient=True
                )
            limit = int(request.get("max_bytes", DEFAULT_MAX_BYTES))
            self._stores[key] = self._core.Store(key[0], key[1], max_bytes=limit)
        return self._stores[key]

    def _make(self, request: Mapping[str, Any], store: Any) -> Outcome:
        from .commands import CompileRefused

        directory = Path(store.make_work_directory())
        try:
            try:
                outcome = self._compile_and_prove(request, store, directory)
            except CompileRefused as refused:
                _forget_locals(refused)
                outcome = Outcome("native", str(refused))
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                _forget_locals(error)
                outcome = Outcome("failed", _one_line(error), transient=_is_transient(error))
            with self._clock.step("publish"):
                self._publish(request, store, outcome)
            return outcome
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _compile_and_prove(
        self, request: Mapping[str, Any], store: Any, directory: Path
    ) -> Outcome:
        from . import timing
        from .calls import Call

        description = request["description"]
        choose = request["choose"]
        call = Call(description)
        with call.state.applied():
            with self._clock.step("native"):
                natives, probe = self._rebuild(call, choose)
            tools = self._make_tools(request, store)
            outcome = self._prove_some_form(call, probe, natives, directory, tools)
            with timing.machine_to_itself(), self._clock.step("time"):
                outcome.timing = timing.time_call(probe)
        faster, reason = timing.decide(outcome.timing, float(request["margin"]))
        outcome.reason = reason
        if not faster and choose != "always":
            outcome.verdict = "native"
        return outcome

    def _prove_some_form(
        self, call: Call, probe: Any, natives: list[Native], directory: Path, tools: Tools
    ) -> Outcome:
        """A proved kernel: bare where that can be, else a container. Raises what both raise."""
        from .prove import ProofFailed

        compiled = self._compile(call, natives, directory / "bare", tools, allow_bare=True)
        try:
            return self._prove(call, probe, natives, compiled)
        except ProofFailed:
            raise  # the container's kernel is the same one
        except RuntimeError as error:
            if compiled.plan is None:
                raise
            traceback.print_exc(file=sys.stderr)
            _forget_locals(error)
        compiled = self._compile(call, natives, directory / "container", tools, allow_bare=False)
        return self._prove(call, probe, natives, compiled)

    def _compile(
        self, call: Call, natives: list[Native], directory: Path, tools: Tools, *, allow_bare: bool
    ) -> CompiledKernel:
        from .compile import compile_call

        directory.mkdir()
        with self._clock.step("compile"):
            compiled = compile_call(
                call, len(natives[0].outputs), directory, tools, allow_bare=allow_bare
            )
        self._clock.seconds.update(
            {f"compile.{step}": seconds for step, seconds in compiled.seconds.items()}
        )
        return compiled

    def _prove(
        self, call: Call, probe: Any, natives: list[Native], compiled: CompiledKernel
    ) -> Outcome:
        from . import prove

        strides = [list(output.stride()) for output in natives[0].outputs]
        outcome = Outcome("kernel", compiled=compiled)
        if compiled.plan is None:
            outcome.output_strides = json.dumps(strides)
        else:
            outcome.launch_plan = compiled.plan.with_strides(strides).to_json()
        with self._clock.step("prove"):
            probe.load(str(compiled.path), outcome.launch_plan)
            outcome.proof = prove.prove(call, probe, natives, reduces=compiled.text.reduces)
        return outcome

    def _rebuild(self, call: Call, choose: str) -> tuple[list[Native], Any]:
        """Native's answers, and a probe that holds the call. Raises unless it has the asked key."""
        from . import prove

        description = call.description
        operator = (description["op"], description["overload"], description["dispatch_key"])
        self._core.register(*operator)
        probe = self._core.Probe(*operator)
        probe.set_undefined(
            [i for i, a in enumerate(description["args"]) if a["kind"] == "undefined_tensor"]
        )
        natives = prove.native_answers(call)
        digest = prove.capture(call, probe, natives[0].sample.clone(), choose)
        if digest != description["digest"]:
            raise _Failure("call could not be rebuilt: its key is another one here")
        return natives, probe

    def _make_tools(self, request: Mapping[str, Any], store: Any) -> Tools:
        from .compile import Tools
        from .toolchain import find_compiler, pick_isa

        if self._scratch is None or not self._scratch.is_dir():
            self._scratch = Path(store.make_work_directory())
            self._tools = None
        # The store removes temporary folders that nobody has touched for an hour.
        os.utime(self._scratch)
        if self._tools is None:
            for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TMPDIR", "tmp")):
                folder = self._scratch / name
                folder.mkdir()
                os.environ[variable] = str(folder)
            headers = self._scratch / "headers"
            headers.mkdir()
            with self._clock.step("start"):
                self._tools = Tools(
                    find_compiler(request.get("cxx")),
                    pick_isa(self._core.host_cpu_features()),
                    headers,
                )
        return self._tools

    def _publish(self, request: Mapping[str, Any], store: Any, outcome: Outcome) -> None:
        from .toolchain import pick_isa

        description = request["description"]
        manifest: dict[str, Any] = {
            "key": description["digest"],
            "kind": outcome.verdict,
            "created": int(time.time()),
            "facts": _facts(request, outcome, self._clock.seconds),
        }
        sources: list[tuple[str, str]] = []
        if outcome.verdict == "kernel" and outcome.compiled is not None:
            manifest["cpu_features"] = list(pick_isa(self._core.host_cpu_features()).features)
            sources.append(("so", str(outcome.compiled.path)))
        elif outcome.verdict == "failed":
            manifest["failure"] = "transient" if outcome.transient else "deterministic"
            if outcome.transient:
                manifest["retry_after"] = int(time.time()) + TRANSIENT_RETRY_SECONDS
        store.publish(manifest, sources)
        self._evict_at_times(store)

    def _evict_at_times(self, store: Any) -> None:
        """Keeps the store within its limits; a scan now and then, by whoever writes."""
        if time.monotonic() - self._last_eviction < EVICTION_SECONDS:
            return
        self._last_eviction = time.monotonic()
        with contextlib.suppress(self._core.StoreError):  # busy: another process does it
            store.evict()


class _Clock:
    """CPU seconds by step, of this process and of the children it has waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = _cpu_seconds()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + _cpu_seconds() - begin, 4)


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _facts(
    request: Mapping[str, Any], outcome: Outcome, seconds: Mapping[str, float]
) -> dict[str, str]:
    import torch

    description = request["description"]
    call = {name: description[name] for name in ("state", "args")}
    facts = {
        "op": f"{description['op']}.{description['overload']}".removesuffix("."),
        "dispatch_key": description["dispatch_key"],
        "call": json.dumps(call, separators=(",", ":"))[:40_000],
        "choose": request["choose"],
        "reason": outcome.reason,
        "torch": str(torch.__version__),
    }
    facts.update({f"seconds_{name}": f"{value:.3f}" for name, value in seconds.items()})
    if outcome.proof is not None:
        facts["numerics"] = outcome.proof.numerics
        facts["fills"] = " ".join(outcome.proof.fills)
        facts["seed"] = str(outcome.proof.seed)
        facts["largest_error_ulp"] = f"{outcome.proof.largest_error:.4g}"
        facts["native_error_ulp"] = f"{outcome.proof.native_error:.4g}"
    if outcome.timing is not None:
        facts["native_ns"] = f"{outcome.timing.native_ns:.1f}"
        facts["kernel_ns"] = f"{outcome.timing.kernel_ns:.1f}"
        facts["spread"] = outcome.timing.spread
        facts["pairs"] = str(outcome.timing.pairs)
    if outcome.compiled is not None:
        facts["kernels"] = " ".join(outcome.compiled.text.kernels)[:2_000]
        facts["form"] = outcome.compiled.form
        if outcome.launch_plan:
            facts["launch_plan"] = outcome.launch_plan
        else:
            facts["output_strides"] = outcome.output_strides
        if outcome.compiled.why_container:
            facts["why_container"] = outcome.compiled.why_container[:300]
        facts["extern_calls"] = " ".join(outcome.compiled.text.extern_calls)[:2_000]
    return facts


def _forget_locals(error: BaseException) -> None:
    """Drops what the error's frames hold: samples, and the probe, of which a thread has one."""
    traceback.clear_frames(error.__traceback__)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, OSError)):
        return True
    return bool(getattr(error, "transient", False))


def _one_line(error: BaseException) -> str:
    from .commands import CompileFailed
    from .prove import CannotProve, ProofFailed

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else "no message")[:300]
    if isinstance(error, (_Failure, CompileFailed, CannotProve, ProofFailed)):
        return text
    return f"{type(error).__name__}: {text}"


def watch_parent(parent: int) -> None:
    """Ends the whole process group once the process ``parent`` is not our parent any more.

    The kernel's signal comes first. The thread is for the cases that it misses: a parent that died
    before it was asked for, or was replaced.
    """

    def end_group(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_group)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        end_group()

    if os.getppid() != parent:
        os._exit(0)
    threading.Thread(target=poll, name="eagercache-parent", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Serves until the end of the input."""
    requests = os.fdopen(os.dup(0), "rb")
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    watch_parent(int(arguments[0]))
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    worker = Worker()
    write_frame(responses, {"ready": True, "pid": os.getpid()})
    while (request := read_frame(requests)) is not None:
        write_frame(responses, worker.handle(request))
    worker.close()
    sys.stderr.flush()
    # Skips the teardown of torch, and of kernels whose threads may still be inside their libraries.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
