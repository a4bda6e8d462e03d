"""One request on its way through the worker: lowered, built (with others), proved, published."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagercache.base.entry_facts import SEARCH, search_is_due
from eagercache.base.toolchain import pick_isa
from eagercache.calls import contract
from eagercache.calls.call import Call
from eagercache.calls.numerics import NotBitwise, ProofFailed, is_device_error
from eagercache.calls.trace_rows import rows_text
from eagercache.worker.inductor.commands import (
    CompileFailed,
    CompileRefused,
    FunctionRefused,
    is_certainly_passing,
)
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.launch_plan import IndexRange, LaunchPlan
from eagercache.worker.timing import timing
from eagercache.worker.timing.gpu_memory import with_room
from eagercache.worker.validation import validate
from eagercache.worker.validation.native import Reshaped, native_answers

if TYPE_CHECKING:
    import torch.fx

    from eagercache.worker.inductor.compile import Lowered
    from eagercache.worker.inductor.shape_plan import ShapePlan
    from eagercache.worker.validation.native import Native
from eagercache.worker.jobs.clock import Clock
from eagercache.worker.jobs.manifest import found_facts, library_object, manifest_of
from eagercache.worker.jobs.outcome import (
    Built,
    Failure,
    Outcome,
    failed_by,
    forget_locals,
    response_of,
)
from eagercache.worker.jobs.trying import Trying
from eagercache.worker.jobs.untried import find_untried

# Native's answers are kept from lowering to proof when all of their samples take at most this.
KEPT_BYTES = 4 << 20


class Job(Trying):
    """One request. The steps are `begin`, `give_library`, `conclude`, `finish`, `close`.

    ``outcome`` is set by the step that decided; later ones then do nothing.
    """

    _composed = False  # the operator is a function of several

    def __init__(self, request: Mapping[str, Any], core: Any) -> None:
        self.request = request
        self.description: Mapping[str, Any] = request["description"]
        self.outcome: Outcome | None = None
        self.lowered: Lowered | None = None
        self.clock = Clock()
        self.device_lost = False  # a GPU reported an error: this process can do no more with it
        self._core = core
        self.store: Any = None
        self._lock: Any = None
        self._publishes = False
        self._replaces = False  # what the store has of this key
        self._untried = None
        self._measured = 0  # so often before, without a decision
        self._directory: Path | None = None
        self._call: Call | None = None
        self._natives: list[Native] | None = None
        self._library: Path | None = None
        self._graph: torch.fx.GraphModule | None = None
        self._ranges: tuple[IndexRange, ...] = ()
        self._strides_of_native: list[list[int]] = []

    def begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        """Takes the key's lock, asks native, has Inductor lower the call."""
        self._guarded(lambda: self._begin(find_store, find_tools))

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        store = self._enter(find_store)
        if self.outcome is not None:
            return
        self._call = call = self._open()
        self._refuse_denied(call)
        with call.state.applied():
            self._graph = self._trace(call)
            with self.clock.step("native"):
                try:
                    natives, probe = self._rebuild(call)
                except Reshaped as reshaped:
                    raise CompileRefused(str(reshaped)) from reshaped
            if self._take_untried(call, probe, natives):
                return
            del probe
            tools = find_tools(store)
            self._strides_of_native = [list(output.stride()) for output in natives[0].outputs]
            self.lowered = self._lower(call, natives, tools, "bare", allow_bare=True)
        if sum(native.bytes for native in natives) <= KEPT_BYTES:
            self._natives = natives

    def _refuse_denied(self, call: Call) -> None:
        """Raises CompileRefused for a call that the table of denied operators names."""
        dtypes = [str(spec.dtype).removeprefix("torch.") for spec in call.tensors]
        denial = self._core.denial(call.name, self.description["dispatch_key"], dtypes)
        if denial:
            raise CompileRefused(denial)

    def _open(self) -> Call:
        """The described call; its operator is the described one from then on."""
        return Call(self.description)

    def _trace(self, call: Call) -> torch.fx.GraphModule | None:
        """The graph to lower, where it is not that of one operator. Raises CompileRefused."""
        return None

    def _enter(self, find_store: Callable[[], Any]) -> Any:
        """The store, with the key's lock taken and a folder made, unless there is an outcome."""
        self.store = store = find_store()
        if "record" in self.request:
            record = self.request["record"]
            transient = record["failure"] == "transient"
            self._publishes = True
            self.outcome = Outcome("failed", str(record["reason"]), transient=transient)
            return store
        digest = self.description["digest"]
        self._lock = store.try_lock(digest)
        if self._lock is None:
            self.outcome = Outcome("busy", "another process compiles this call")
            return store
        # Whoever held the lock before may have published in the meantime.
        entry = store.find(digest)
        if entry is not None and self._searches(entry):
            self._replaces = True
        elif entry is not None and self._measures_again(entry):
            self._replaces = True
            self._measured = int(self.description["again"])
            known = json.loads(entry["facts"].get("integers", "[]"))
            self.description = {**self.description, "integers": known}
        elif entry is not None:
            reason = entry.get("facts", {}).get("reason", "")
            self.outcome = Outcome(entry["kind"], reason, published=True)
            return store
        self._publishes = True
        self._directory = Path(store.make_work_directory())
        # One that a worker was lost over is not tried again.
        if self.request.get("tries", True) and not self._replaces:
            self._untried = find_untried(store, digest, str(self._directory))
        return store

    @property
    def _searches_now(self) -> bool:
        """Whether other forms of a kernel are looked for in this job, and not later."""
        return self.description.get("again") == SEARCH or self.request.get("search") == "deep"

    def _searches(self, entry: Mapping[str, Any]) -> bool:
        """Whether other forms of this entry's kernel are asked for, and were not looked for."""
        return self._searches_now and search_is_due(entry.get("facts", {}))

    def _measures_again(self, entry: Mapping[str, Any]) -> bool:
        """Whether this very entry, of which noise hid what is faster, is to be replaced."""
        measured = entry.get("facts", {}).get("measured")
        return entry["kind"] == "native" and measured == str(self.description.get("again"))

    def _improves(self, call: Call) -> bool:
        """Whether the kernel may be what `vector_math` makes of Inductor's text."""
        return False

    def _lower(
        self, call: Call, natives: Sequence[Native], tools: Tools, name: str, *, allow_bare: bool
    ) -> Lowered:
        assert self._directory is not None
        directory = self._directory / name
        directory.mkdir()
        with self.clock.step("compile"):
            lowered = tools.lower(
                call,
                len(natives[0].outputs),
                directory,
                allow_bare=allow_bare,
                graph=self._graph,
                ranges=self._ranges,
                improves=self._improves(call),
                contract=self._contract_of("container", "", json.dumps(self._strides_of_native)),
            )
        self.clock.add({f"compile.{step}": value for step, value in lowered.seconds.items()})
        return lowered

    def _rebuild(self, call: Call, natives: list[Native] | None = None) -> tuple[list[Native], Any]:
        """Native's answers, and a probe that holds the call. Raises unless it has the asked key."""
        description = self.description
        operator = (description["op"], description["overload"], description["dispatch_key"])
        self._core.register(*operator)
        probe = self._core.Probe(*operator)
        probe.set_undefined(
            [i for i, a in enumerate(description["args"]) if a["kind"] == "undefined_tensor"]
        )
        if natives is None:
            natives = native_answers(call)
        digest = validate.capture(call, probe, natives[0].sample.clone(), self.request["choose"])
        if digest != description["digest"]:
            raise Failure("call could not be rebuilt: its key is another one here")
        return natives, probe

    @property
    def plan(self) -> LaunchPlan | ShapePlan | None:
        """The launch plan that waits for its kernel to be built."""
        return self.lowered.plan if self.outcome is None and self.lowered is not None else None

    @property
    def contract(self) -> str:
        """What the shared object says of this job's entry."""
        assert isinstance(self.plan, LaunchPlan)
        return self._contract_of("bare", self.plan.with_strides(self._strides_of_native).to_json())

    def _contract_of(self, form: str, plan: str, strides: str = "") -> str:
        return contract.contract_of(
            self.description["digest"], form, plan, strides, self._cpu_features()
        )

    def _cpu_features(self) -> tuple[str, ...]:
        """What code for this machine's processors needs of another one's."""
        return tuple(pick_isa(self._core.host_cpu_features()).features)

    def give_library(self, library: Path, seconds: Mapping[str, float], jobs: int) -> None:
        """The shared object that holds this job's kernel and those of ``jobs`` - 1 others."""
        self._library = library
        self.clock.add({f"compile.{step}": value / jobs for step, value in seconds.items()})
        self.clock.add({"compile": sum(seconds.values()) / jobs})

    def fail(self, error: BaseException) -> None:
        """Ends the job with ``error``."""
        self.device_lost |= is_device_error(error)
        self.outcome = failed_by(error)

    def conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        """Proof, timing, decision."""
        if self.outcome is None:
            self._guarded(lambda: self._conclude(find_tools))

    def _conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        assert self._call is not None and self.lowered is not None
        call = self._call
        with call.state.applied():
            with self.clock.step("native"):
                natives, probe = self._rebuild(call, self._natives)
            outcome = self._prove_some_form(call, probe, natives, find_tools)
            self._time(call, probe, natives, outcome)
        self._decide(outcome)
        self.outcome = outcome

    def _decide(self, outcome: Outcome) -> None:
        """Native for a kernel that was not measured to be faster."""
        assert outcome.timing is not None
        faster, outcome.reason = timing.decide(outcome.timing, float(self.request["margin"]))
        if not faster and self.request["choose"] != "always":
            outcome.verdict = "native"
            self._note_undecided(outcome)

    def _note_undecided(self, outcome: Outcome) -> None:
        """Counts a measurement that noise spoilt: the program asks again (runtime_again.cc).

        One that others kept from being made is none, and brings the last one no nearer.
        """
        if outcome.verdict == "native" and outcome.reason == timing.UNDECIDED:
            made = not (outcome.timing is not None and outcome.timing.disturbed)
            outcome.facts["measured"] = str(max(1, self._measured + made))

    def _prove_some_form(
        self, call: Call, probe: Any, natives: list[Native], find_tools: Callable[[Any], Tools]
    ) -> Outcome:
        """A proved kernel: bare where that can be, else a container. Raises what both raise."""
        assert self.lowered is not None
        if isinstance(self.lowered.plan, LaunchPlan) and self._library is not None:
            plan = self.lowered.plan.with_strides(self._strides_of_native).to_json()
            try:
                bare = Built(library_object(self._library), self.lowered, "bare", launch_plan=plan)
                return self._prove(call, probe, natives, bare)
            except NotBitwise as differs:
                raise CompileRefused(str(differs)) from differs
            except ProofFailed:
                raise  # the container's kernel is the same one
            except RuntimeError as error:
                traceback.print_exc(file=sys.stderr)
                forget_locals(error)
                if call.written:
                    raise  # a container allocates what it returns; none is made that writes
            tools = find_tools(self.store)
            self.lowered = self._lower(call, natives, tools, "container", allow_bare=False)
        assert self.lowered.container is not None
        container = Built(
            library_object(self.lowered.container),
            self.lowered,
            "container",
            output_strides=json.dumps(self._strides_of_native),
        )
        return self._prove(call, probe, natives, container)

    def _prove(self, call: Call, probe: Any, natives: list[Native], kernel: Built) -> Outcome:
        outcome = Outcome("kernel", kernel=kernel)
        with self.clock.step("prove"):
            self._load(probe, kernel)
            outcome.proof = with_room(lambda: self._proof_of(kernel, call, probe, natives))
        return outcome

    def _proof_of(
        self, kernel: Built, call: Call, probe: Any, natives: list[Native], others: int = 0
    ) -> validate.Proof:
        """What the probe's kernel is worth on this call; see `validate.prove`."""
        text = kernel.lowered.text
        return validate.prove(
            call,
            probe,
            natives,
            reduces=text.reduces,
            approximates=text.approximates,
            calls_functions=text.calls_functions,
            composed=self._composed,
            others=others,
        )

    def _load(self, probe: Any, kernel: Built) -> None:
        """Puts the kernel into the probe."""
        probe.load(kernel.objects[0][1], kernel.launch_plan)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Runs a step; what it raises is the outcome."""
        try:
            step()
        except CompileRefused as refused:
            forget_locals(refused)
            if is_certainly_passing(refused):
                self.outcome = Outcome("failed", str(refused), transient=True)
                return
            read = {} if refused.read is None else {"functions": rows_text(refused.read)}
            of_all = isinstance(refused, FunctionRefused)
            self.outcome = Outcome("native", str(refused), refused=of_all, facts=read)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            forget_locals(error)
            self.fail(error)

    def finish(self) -> dict[str, Any]:
        """Publishes the outcome; the response. Never raises for what the request asks."""
        if self.outcome is None:
            self.outcome = Outcome("failed", "no outcome", transient=True)
        if self._publishes and self.store is not None:
            try:
                with self.clock.step("publish"):
                    self._publish(self.outcome)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                self.fail(error)
        return response_of(self.description, self.outcome, self.clock.seconds)

    def close(self) -> None:
        """Releases the key, and removes what was built for this job alone."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def build_alone(self, tools: Tools) -> None:
        """Builds this job's own shared object."""
        assert self.plan is not None and self._directory is not None
        try:
            library = tools.bare.build([self.plan], self._directory, [self.contract])
        except CompileFailed as error:
            self.fail(error)
        else:
            self.give_library(library, tools.bare.seconds, 1)

    def _publish(self, outcome: Outcome) -> None:
        if outcome.of_imports:
            return  # the program's files may be others at its next run
        if self._replaces:
            if outcome.transient or (outcome.verdict == "failed" and not self._measured):
                return  # what was known stays
            with contextlib.suppress(self._core.StoreError):
                self.store.remove(self.description["digest"])
        if self._untried is not None and outcome.published:
            found = self._untried.tried(outcome, found_facts(outcome))
            self.store.publish(found, list(self._untried.objects))
            return
        manifest, sources = manifest_of(
            self.request, outcome, self.clock.seconds, self._cpu_features
        )
        self.store.publish(manifest, sources)
