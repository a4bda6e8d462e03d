"""One request for a kernel with symbolic sizes: lowered, built (with others), proved, published.

It is proved on several members of its class, timed on calls of several sizes, and used for those
sizes near which it was faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from eagercache.base.toolchain import pick_isa
from eagercache.calls.call import Call
from eagercache.worker.compat import symbolic_shapes
from eagercache.worker.inductor.call_graph import build_graph, example_inputs
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Lowered, Tools
from eagercache.worker.inductor.generated_text import admit, read_generated_text
from eagercache.worker.inductor.launch_plan import InputCheck
from eagercache.worker.inductor.shape_plan import ShapePlan, Symbols, read_shape_plan
from eagercache.worker.inductor.vector_math import corrected, improved
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.jobs.class_job import FamilyJob
from eagercache.worker.jobs.outcome import Built, Outcome
from eagercache.worker.samples.draws import SEED
from eagercache.worker.samples.ordinary_operands import ordinary_inputs
from eagercache.worker.samples.shape_class import (
    ShapeFamily,
    elements_of,
    proof_values,
    read_sizes,
    sizes_text,
    timing_values,
)
from eagercache.worker.timing import timing
from eagercache.worker.validation import validate
from eagercache.worker.validation.native import native_answers

if TYPE_CHECKING:
    import torch.fx

    from eagercache.calls.samples import Sample

# Elements of the largest tensor of the calls that a kernel is timed on, beside the request's own.
TIMED_ELEMENTS = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20)
# That an entry names of those on which its kernel was proved.
MOST_SIZES = 100
_VECTOR_BYTES = {"avx512": 64, "avx2": 32}
# By how much the strides are larger that sizes do not say, where a kernel is proved on others than
# the call's own: an output that native gives such a stride has no kernel for all of them.
_FURTHER = (1, 4_099)


class SizedPlan(Protocol):
    """A plan for open sizes, for whatever device."""

    @property
    def guards(self) -> tuple[str, ...]:
        """What was assumed about the sizes, as C++ text."""

    def admits(self, values: Sequence[int]) -> bool:
        """Whether the kernel holds for these values of the open sizes."""

    def to_json(self, choice: Sequence[tuple[int, bool]]) -> str:
        """The text that the manifest stores."""


class ShapeJob(FamilyJob):
    """A job whose kernel answers a shape class."""

    _forms: tuple[str, ...] = ("shapes",)
    _timed_elements: tuple[int, ...] = TIMED_ELEMENTS

    def __init__(self, request: Mapping[str, Any], core: Any) -> None:
        super().__init__(request, core)
        self._family: ShapeFamily | None = None
        self._strides: dict[tuple[int, ...], list[list[int]]] = {}  # native's, by symbols' values

    def _begin(self, find_store: Callable[[], Any], find_tools: Callable[[Any], Tools]) -> None:
        store = self._enter(find_store)
        if self.outcome is not None:
            return
        self._family = family = ShapeFamily(self.description)
        self._call = family.call
        if family.call.written:
            raise CompileRefused("operators that write have kernels for exact sizes only")
        self._register()
        with family.call.state.applied():
            if self._try_untried(self._untried_sizes):
                return
            with self.clock.step("compile"):
                self.lowered = self._lower_shapes(family, find_tools(store))
        self.clock.add({f"compile.{k}": v for k, v in self.lowered.seconds.items()})

    def _untried_sizes(self, kernel: Built) -> Outcome:
        """What another machine's kernel is on the sizes on which that one proved it, and our own.

        For which sizes it is chosen is not measured again without a plan: then it is compiled.
        """
        assert self._family is not None and self._untried is not None
        family = self._family
        if self._untried.times:
            raise CompileRefused("sizes are timed with a kernel that is made here")
        proved = read_sizes(self._untried.facts["proved_sizes"], len(family.symbols))
        apart = _FURTHER if family.has_open_strides else ()
        tried = [(values, 0) for values in dict.fromkeys([*proved, tuple(family.values)])]
        tried += [(tuple(family.values), n) for n in apart]
        plan = {**json.loads(kernel.launch_plan), "choice": [[1, True]]}
        text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        everywhere = replace(kernel, launch_plan=text)
        outcome = Outcome("kernel", kernel=kernel)
        for values, further in tried:
            member = self._member(family, values, further)
            where = f"sizes {sizes_text(values)}, strides + {further}"
            others = len(tried) - 1
            self._prove_member(member, everywhere, outcome, where, others)
        return outcome

    @property
    def contract(self) -> str:
        """What the shared object says of this job's entry, whatever it is chosen for."""
        assert isinstance(self.plan, ShapePlan)
        return self._contract_of("shapes", self.plan.to_json([]))

    def _symbolic_graph(
        self, family: ShapeFamily, fakes: Sequence[torch.Tensor], names: Sequence[str]
    ) -> torch.fx.GraphModule:
        """The graph for ``fakes``, whose sizes are the symbols ``names`` where they are open."""
        natives = native_answers(family.call)
        return build_graph(family.symbolic(), len(natives[0].outputs), family.tied_sizes)

    def _member(self, family: ShapeFamily, values: Sequence[int], further: int = 0) -> Call:
        """The call of the family whose symbols have these values; see `ShapeFamily.member`."""
        return family.member(values, further)

    def _lower_shapes(self, family: ShapeFamily, tools: Tools) -> Lowered:
        """Inductor's text for symbolic sizes, as a plan. Raises CompileRefused."""
        assert self._directory is not None
        begin = time.process_time()
        fakes, environment, symbols = with_symbols(family)
        graph = self._symbolic_graph(family, fakes, symbols.names)
        directory = self._directory / "shapes"
        directory.mkdir()
        texts: list[tuple[str, str]] = []
        tools.read_texts(graph, tuple(fakes), directory, lambda *both: texts.append(both))
        if not texts:
            raise CompileRefused("nothing was generated")
        wrapper, kernel = texts[-1]
        text = read_generated_text(wrapper, kernel)
        admit(text, family.call, checked=bool(self._ranges))
        try:
            guards = symbolic_shapes.assumptions(environment, symbols.names)
            symbols = replace(symbols, guards=tuple(guards))
            chunked = corrected(kernel)
            plan, exact = self._read_plan(wrapper, chunked, family, symbols), None
            if self._improves(family.call):
                exact = plan
                plan = self._read_plan(wrapper, improved(kernel), family, symbols, distinct=True)
        except (NotUnderstood, ValueError) as error:
            raise CompileRefused(f"no kernel with symbolic sizes: {error}") from error
        seconds = {"lower": round(time.process_time() - begin, 4)}
        return Lowered(text, plan, None, "", seconds, exact)

    def _read_plan(
        self,
        wrapper: str,
        kernel: str,
        family: ShapeFamily,
        symbols: Symbols,
        *,
        distinct: bool = False,
    ) -> ShapePlan:
        native = [(family.values, self._native_strides(family, family.values))]
        plan = read_shape_plan(wrapper, kernel, symbols, family.pattern, native, distinct=distinct)
        if not plan.admits(family.values):
            raise NotUnderstood(
                f"guards that the call itself does not meet: {'; '.join(plan.guards)[:300]}"
            )
        # Strides that hold for the call alone may be a coincidence.
        others = proof_values(family, plan.admits, self._vector_lengths(family))
        native += [(values, self._native_strides(family, values)) for values in others[1:6]]
        plan = read_shape_plan(wrapper, kernel, symbols, family.pattern, native, distinct=distinct)
        checks: list[InputCheck] = [*self._ranges]
        return plan.with_checks([*checks, *ordinary_inputs(family.call, symbols.inputs)])

    def _native_strides(self, family: ShapeFamily, values: Sequence[int]) -> list[list[int]]:
        known = self._strides.get(tuple(values))
        if known is None:
            member = self._member(family, values)
            known = [list(o.stride()) for o in native_answers(member)[0].outputs]
            self._strides[tuple(values)] = known
        return known

    def _vector_lengths(self, family: ShapeFamily) -> list[int]:
        isa = pick_isa(self._core.host_cpu_features()).name
        width = _VECTOR_BYTES.get(isa, 16)
        return sorted({max(2, width // spec.dtype.itemsize) for spec in family.call.tensors})

    def _sized_of(self, lowered: Lowered) -> SizedPlan:
        """The plan whose kernel is built."""
        assert isinstance(lowered.plan, ShapePlan)
        return lowered.plan

    def _built(self, choice: Sequence[tuple[int, bool]]) -> Built:
        """The kernel, which answers calls by ``choice``."""
        assert self.lowered is not None and self._library is not None
        objects = (("so", str(self._library)),)
        return Built(objects, self.lowered, "shapes", self._sized_of(self.lowered).to_json(choice))

    def _conclude(self, find_tools: Callable[[Any], Tools]) -> None:
        assert self._family is not None and self.lowered is not None
        family, plan = self._family, self._sized_of(self.lowered)
        kernel = self._built([(1, True)])
        outcome = Outcome("kernel", kernel=kernel)
        with family.call.state.applied():
            proved = proof_values(family, plan.admits, self._vector_lengths(family))
            apart = _FURTHER if family.has_open_strides else ()
            tried = [(values, 0) for values in proved] + [(family.values, n) for n in apart]
            for values, further in tried:
                where = f"sizes {sizes_text(values)}"
                where += f", strides + {further}" if further else ""
                member = self._member(family, values, further)
                self._prove_member(member, kernel, outcome, where, len(tried) - 1)
            choice = self._choose(family, plan, outcome)
        outcome.kernel = self._built(choice)
        outcome.facts = {
            "guards": "; ".join(plan.guards)[:2_000],
            "proved_sizes": " ".join(map(sizes_text, proved[:MOST_SIZES])),
            **outcome.facts,
        }
        self.outcome = outcome

    def _choose(
        self, family: ShapeFamily, plan: SizedPlan, outcome: Outcome
    ) -> list[tuple[int, bool]]:
        """(elements, whether the kernel is to answer calls of about so many), ascending."""
        assert outcome.kernel is not None
        margin, always = float(self.request["margin"]), self.request["choose"] == "always"
        choice: dict[int, bool] = {}
        members: set[int] = set()
        lines: list[str] = []
        timed = timing_values(family, plan.admits, () if always else self._timed_elements)
        for values in timed:
            member = self._member(family, values)
            # Of other sizes than the call's own it only counts who wins.
            edge = 1.0 - margin if lines else None
            elements, measured = self._time_member(member, outcome.kernel, edge)
            faster, reason = self._decide_member(measured, margin)
            if outcome.timing is None:
                outcome.timing = measured
            members.add(elements)
            if faster or always or not measured.disturbed:  # else the nearest size tells
                choice[elements] = choice.get(elements, True) and (faster or always)
            lines.append(f"{sizes_text(values)}: {measured.line(reason)}")
        outcome.facts["timings"] = "; ".join(lines)[:8_000]
        if not any(choice.values()):
            outcome.verdict = "native"
            decided_all = len(choice) == len(members)
            outcome.reason = "slower" if decided_all else timing.UNDECIDED
            self._note_undecided(outcome)
        return sorted(choice.items())

    def _time_member(
        self, member: Call, kernel: Built, edge: float | None
    ) -> tuple[int, timing.Timing]:
        """(elements of the call, its timing). The probe, of which a thread has one, ends here."""
        sample = member.sample("unit", SEED)
        probe = self._probe()
        validate.capture(member, probe, sample, self.request["choose"])
        self._load(probe, kernel)
        elements = elements_of(member, member.invoke(sample.clone().values))
        with timing.machine_to_itself(), self.clock.step("time"):
            return elements, self._time_captured(member, probe, sample, edge)

    def _time_captured(
        self, member: Call, probe: Any, sample: Sample, edge: float | None
    ) -> timing.Timing:
        """Times the call in the probe, which ``sample`` is the data of."""
        return timing.time_call(probe, edge)

    def _decide_member(self, measured: timing.Timing, margin: float) -> tuple[bool, str]:
        """Whether the kernel was faster there, and why not."""
        return timing.decide(measured, margin)


def with_symbols(family: ShapeFamily) -> tuple[list[torch.Tensor], Any, Symbols]:
    """(the call's tensors with open sizes, where guards gather, the sizes' names without any)."""
    fakes, environment = symbolic_shapes.symbolic_tensors(
        example_inputs(family.call), frozenset(family.symbols)
    )
    sizes = tuple(tuple(symbolic_shapes.size_text(n) for n in fake.size()) for fake in fakes)
    names = tuple(sizes[tensor][dimension] for tensor, dimension in family.symbols)
    return fakes, environment, Symbols(names, sizes, ())
