"""What became of the calls of a model's modules: `explain_module`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagercache.base import config
from eagercache.calls.texts import counted
from eagercache.frontend.tables import html_table

if TYPE_CHECKING:
    from eagercache.modules.stats import ModuleStats


# So many modules are shown in the short form.
_MOST_SHOWN = 20


@dataclass(frozen=True, repr=False)
class ModuleInfo:
    """One module of a model that was met, and those below it.

    Attributes:
        path: where it is below the module that was asked about, which is "".
        name: its class.
        calls: how often it was called.
        hits: calls that its kernel answered; the others were its forward's.
        native_ns: nanoseconds of a call by the forward, as measured when its kernel was made; None
            where it has no kernel or none was timed. Calls with gradients where those alone have
            one.
        kernel_ns: the same by the kernel.
        seconds_saved: by its own kernels: hits times what a call saved when it was measured.
            Negative where kernels take longer.
        state: "watched", "new" (not looked at yet) or "refused".
        reason: why it has no kernel; empty where it has one or that is not decided.
        children: the modules below it that were met, in the order of `named_modules()`.
    """

    path: str
    name: str
    calls: int
    hits: int
    native_ns: float | None
    kernel_ns: float | None
    seconds_saved: float
    state: config.ModuleState
    reason: str
    children: tuple[ModuleInfo, ...] = ()

    def walk(self) -> Iterator[ModuleInfo]:
        """The module and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def total_seconds_saved(self) -> float:
        """By this module's kernels and those of all modules below it."""
        return sum(part.seconds_saved for part in self.walk())

    def __repr__(self) -> str:
        faster = ""
        if self.native_ns and self.kernel_ns:
            faster = f", {self.native_ns / self.kernel_ns:.2f} times as fast"
        saved = self.total_seconds_saved()
        return (
            f"<{self.path or '(root)'}: {self.name.rpartition('.')[2]}, "
            f"{self.hits:,} of {counted(self.calls, 'call')} by kernel{faster}"
            + (f", {saved:.3g} s saved" if saved else "")
            + (f", {len(self.children)} below" if self.children else "")
            + ">"
        )


def _tree(rows: list[tuple[str, ModuleStats]]) -> tuple[ModuleInfo, ...]:
    """The modules that are below no other one of ``rows``, which are in order of the model."""
    below: dict[str, list[str]] = {}
    tops = []
    known = dict(rows)
    for path in known:
        parent = path
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in known:
                below.setdefault(parent, []).append(path)
                break
        else:
            tops.append(path)

    def made(path: str) -> ModuleInfo:
        return _info(path, known[path], tuple(map(made, below.get(path, ()))))

    return tuple(map(made, tops))


def _info(path: str, stats: ModuleStats, children: tuple[ModuleInfo, ...]) -> ModuleInfo:
    from eagercache.modules import gains

    measured = gains.times(stats.identity, False) or gains.times(stats.identity, True)
    native_ns, kernel_ns = measured or (None, None)
    others = stats.pending + stats.native + sum(stats.aside_reasons.values())
    return ModuleInfo(
        path=path,
        name=stats.name,
        calls=stats.hits + others,
        hits=stats.hits,
        native_ns=native_ns,
        kernel_ns=kernel_ns,
        seconds_saved=gains.seconds_saved(stats),
        state=stats.state,
        reason=stats.reason or stats.training_reason,
        children=children,
    )


class ModuleReport(list[str]):
    """One line for each module that was met, as `explain_module` gives them.

    `print` shows all lines, each with the reasons; in a session of Python it is shown in short, and
    in a notebook as a table.

    Attributes:
        rows: for each line where the module is below the one that was asked about, which is "", and
            its counters.
        tree: the modules as objects with times and seconds saved, each with those below it: the
            one that was asked about, or where that was not met those below it that were.
    """

    def __init__(self, rows: list[tuple[str, ModuleStats]]) -> None:
        super().__init__(stats.line(path) for path, stats in rows)
        self.rows = rows
        self.tree = _tree(rows)

    def _walk(self) -> Iterator[tuple[int, ModuleInfo]]:
        waiting = [(0, info) for info in reversed(self.tree)]
        while waiting:
            depth, info = waiting.pop()
            yield depth, info
            waiting.extend((depth + 1, child) for child in reversed(info.children))

    def __str__(self) -> str:
        return "\n".join(self) if self else repr(self)

    def __repr__(self) -> str:
        if not self:
            return "<eagercache: no module of it was met; see enable(modules='auto')>"
        infos = list(self._walk())
        saved = sum(info.seconds_saved for _, info in infos)
        hits = sum(info.hits for _, info in infos)
        lines = [
            f"eagercache: {counted(len(infos), 'module')}, {counted(hits, 'call')} by kernels, "
            f"{saved:.3g} s saved"
        ]
        lines += [f"{'  ' * (depth + 1)}{info!r}" for depth, info in infos[:_MOST_SHOWN]]
        left = len(infos) - _MOST_SHOWN
        return "\n".join(lines + ([f"  and {left} more"] if left > 0 else []))

    def _repr_html_(self) -> str:
        return html_table(
            "eagercache: modules",
            (
                *("module", "class", "by kernel", "of calls", "forward us", "kernel us"),
                *("seconds saved", "state", "why"),
            ),
            (
                (
                    "\N{NO-BREAK SPACE}" * 4 * depth + (info.path or "(root)"),
                    info.name,
                    info.hits,
                    info.calls,
                    info.native_ns / 1e3 if info.native_ns else "",
                    info.kernel_ns / 1e3 if info.kernel_ns else "",
                    info.seconds_saved,
                    info.state,
                    info.reason,
                )
                for depth, info in self._walk()
            ),
        )


def require_module(function: str, module: Any) -> None:
    """Raises TypeError for what is no module, with the remedy."""
    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{function}() takes a torch.nn.Module, not {module!r}; enable(modules=...) chooses "
            "modules by class or name"
        )


def explain_module(module: Any) -> ModuleReport:
    """What happened to calls of ``module`` and of each module below it that was met, and why.

    A list of lines to print; its `tree` has the same as objects, with times and seconds saved.
    Raises TypeError for what is no module.
    """
    require_module("explain_module", module)
    loaded = sys.modules.get("eagercache.modules.manager")
    if loaded is None:
        return ModuleReport([])
    known = {id(part): row for part, row in loaded.manager.stats()}
    return ModuleReport(
        [(path, known[id(part)]) for path, part in module.named_modules() if id(part) in known]
    )
