"""The compile worker: ``python -m eagercache.worker [BYTES] PARENT_PID``.

A persistent process of its own group that reads requests from its standard input and answers on a
private duplicate of its standard output. Both carry frames: four bytes of length, little-endian,
then JSON. A frame is one request, or {"batch": [...]} of several, each of which gets a response; in
between come {"at": index} of the request that is begun next, so that whoever reads knows which one
the worker died of.
Whatever libraries print to file descriptor 1 goes to standard error and cannot break a frame.

It exits at the end of its input, and takes its whole process group (compilers included) with it
when its parent is gone. It is the only place where a fresh kernel runs before it is proved: a crash
or a hang here is an answer, not an accident.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagercache.base.frames import read_frame, write_frame

if TYPE_CHECKING:
    from eagercache.worker.inductor.compile import Tools
    from eagercache.worker.jobs.job import Job

DEFAULT_MAX_BYTES = 10 << 30
_PARENT_CHECK_SECONDS = 0.5


class Worker:
    """Serves requests one after the other. Bound to the thread that made it."""

    def __init__(self) -> None:
        from eagercache.base import environment
        from eagercache.base.load import core

        if core is None:
            raise RuntimeError("eagercache does not work on this platform")
        self._core: Any = core
        self._environment = environment
        self._stores: dict[tuple[str, str, str], Any] = {}
        self._scratch: Path | None = None
        self._tools: Tools | None = None
        self.device_lost = False  # see Job.device_lost

    def handle(self, requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The responses to some requests, each with its "index" among them, in any order.

        Their kernels are built together. Before something is done for a single one of several,
        {"at": its index}; None where it is done for all. Never raises for what a request asks.
        """
        from eagercache.base.worker_variables import as_in_program
        from eagercache.worker.jobs.kinds import make_job
        from eagercache.worker.timing import gpu_memory, idle_threads

        idle_threads.keep_asleep()
        jobs: dict[int, Job] = {}
        folder: Path | None = None
        try:
            if any(one["description"].get("dispatch_key") == "CUDA" for one in requests):
                gpu_memory.take_a_share()
            for index, request in enumerate(requests):
                if len(requests) > 1:
                    yield {"at": index}
                job = make_job(request, self._core)
                jobs[index] = job
                with as_in_program(request.get("variables")):
                    job.begin(functools.partial(self._store, request), self._find_tools(request))
                if job.outcome is not None:
                    yield self._finish(jobs, index)
            if len(jobs) > 1:
                yield {"at": None}
            folder = self._build([job for job in jobs.values() if job.plan is not None])
            for index in list(jobs):
                if len(requests) > 1:
                    yield {"at": index}
                request = jobs[index].request
                with as_in_program(request.get("variables")):
                    jobs[index].conclude(self._find_tools(request))
                yield self._finish(jobs, index)
        finally:
            for job in jobs.values():
                job.close()
            gpu_memory.give_back()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _build(self, jobs: Sequence[Job]) -> Path | None:
        """One shared object for all; where that fails, one for each. The folder to remove."""
        if not jobs:
            return None
        assert self._tools is not None
        folder: Path | None = None
        try:
            folder = Path(jobs[0].store.make_work_directory())
            plans = [job.plan for job in jobs if job.plan is not None]
            contracts = [job.contract for job in jobs]
            library = self._tools.bare.build(plans, folder, contracts)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            for job in jobs:
                job.build_alone(self._tools)
        else:
            for job in jobs:
                job.give_library(library, self._tools.bare.seconds, len(jobs))
        return folder

    def _finish(self, jobs: dict[int, Job], index: int) -> dict[str, Any]:
        job = jobs.pop(index)
        try:
            response = {**job.finish(), "index": index}
            self.device_lost |= job.device_lost
        finally:
            job.close()
        if job.store is not None:
            with contextlib.suppress(
                self._core.StoreError
            ):  # busy: another process does it, or did
                job.store.evict(when_due=True)
        return response

    def close(self) -> None:
        """Removes the private folder."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _store(self, request: Mapping[str, Any]) -> Any:
        revoked = str(request.get("revoked", ""))
        key = (request["store_root"], request["environment"], revoked)
        if key not in self._stores:
            from eagercache.worker.jobs.outcome import Failure

            own = self._environment.environment_text(cxx=request.get("cxx"))
            differing = self._environment.diff(own, request["environment"])
            if differing:
                raise Failure(
                    f"the worker's environment differs in {', '.join(differing)}", transient=True
                )
            limit = int(request.get("max_bytes", DEFAULT_MAX_BYTES))
            self._stores[key] = self._core.Store(
                key[0],
                key[1],
                max_bytes=limit,
                # The program's choice: a worker has none of its settings.
                allow_untrusted=bool(request.get("allow_untrusted", False)),
                revoked=revoked,
            )
        return self._stores[key]

    def _find_tools(self, request: Mapping[str, Any]) -> Callable[[Any], Any]:
        description = request["description"]
        whole = description.get("kind") in ("module", "deploy")
        if description.get("dispatch_key") == "CUDA" and not whole:
            return lambda store: self._find_late_tools(request, store)
        return lambda store: self._make_tools(request, store)

    def _find_late_tools(self, request: Mapping[str, Any], store: Any) -> Callable[[], Tools]:
        """What makes the tools: most kernels for CUDA need no C++ compiler."""
        self._make_scratch(store)
        return functools.partial(self._make_tools, request, store)

    def _make_tools(self, request: Mapping[str, Any], store: Any) -> Tools:
        from eagercache.base.toolchain import find_compiler, pick_isa
        from eagercache.worker.inductor.compile import Tools

        scratch = self._make_scratch(store)
        if self._tools is None:
            headers = scratch / "headers"
            headers.mkdir(exist_ok=True)  # what follows may have failed before
            compiler = find_compiler(request.get("cxx"))
            isa = pick_isa(self._core.host_cpu_features())
            self._tools = Tools(compiler, isa, headers, Path(request["store_root"]))
            # Inductor is imported, and what that made stays: to look through it costs a fifth of
            # each lowering.
            gc.freeze()
            gc.enable()
        self._tools.processors = _processors(request)
        return self._tools

    def _make_scratch(self, store: Any) -> Path:
        """A private folder in the store, where Inductor and Triton keep their files."""
        if self._scratch is None or not self._scratch.is_dir():
            self._scratch = Path(store.make_work_directory())
            self._tools = None
            for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TMPDIR", "tmp")):
                folder = self._scratch / name
                folder.mkdir()
                os.environ[variable] = str(folder)
            os.chdir(self._scratch)  # for what libraries write where they are
        # The store removes temporary folders that nobody has touched for an hour.
        os.utime(self._scratch)
        return self._scratch


def _processors(request: Mapping[str, Any]) -> int:
    """How many compilers may run beside this worker.

    Those that give way to everybody, as they do where it does, may have all that is left over.
    """
    gives_way = os.sched_getscheduler(0) == os.SCHED_IDLE
    left_over = int(request.get("left_over", 0)) if gives_way else 0
    return max(int(request.get("processors", 0)), left_over)


def watch_parent(parent: int) -> None:
    """Ends the whole process group once the process ``parent`` is not our parent any more.

    Where the program started it, the kernel did that before (`service.tether`). The thread is for
    a worker that was started by other means, and for systems without them.
    """

    def end_group(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_group)

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        end_group()

    if os.getppid() != parent:
        os._exit(0)
    threading.Thread(target=poll, name="eagercache-parent", daemon=True).start()


def limit_memory(limit: int) -> None:
    """Allocations of this process, and of each of its children, fail past ``limit`` bytes.

    RLIMIT_DATA counts what is written to; address space is no measure of torch, which maps
    gigabytes that it never touches.
    """
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(arguments: list[str]) -> int:
    """Serves until the end of the input."""
    from eagercache.base.worker_environment import add_late_paths

    requests = os.fdopen(os.dup(0), "rb")
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)  # the service says where a worker was when it died
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    watch_parent(int(arguments[-1]))
    if len(arguments) > 1:
        limit_memory(int(arguments[0]))
    add_late_paths(os.environ)
    # While a quarter of a million objects are imported, none of them is garbage worth looking for.
    gc.disable()
    worker = Worker()
    write_frame(responses, {"ready": True, "pid": os.getpid()})
    while (frame := read_frame(requests)) is not None:
        for response in worker.handle(frame.get("batch", [frame])):
            write_frame(responses, response)
            if worker.device_lost:
                break  # what is left is asked of another worker
        if worker.device_lost:
            break
        if not gc.isenabled():
            gc.enable()
    worker.close()
    sys.stderr.flush()
    # Skips the teardown of torch, and of kernels whose threads may still be inside their libraries.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
