"""What became of the calls of a model's modules: `explain_module`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from eagercache.frontend.tables import html_table

if TYPE_CHECKING:
    from eagercache.modules.stats import ModuleStats


class ModuleReport(list[str]):
    """One line for each module that was met, as `explain_module` gives them.

    Attributes:
        rows: for each line where the module is below the one that was asked about, which is "", and
            its counters.
    """

    def __init__(self, rows: list[tuple[str, ModuleStats]]) -> None:
        super().__init__(stats.line(path) for path, stats in rows)
        self.rows = rows

    def __repr__(self) -> str:
        if not self:
            return "<eagercache: no module of it was met; see enable(modules='auto')>"
        return "\n".join(self)

    def _repr_html_(self) -> str:
        return html_table(
            "eagercache: modules",
            ("module", "class", "by kernel", "with gradients", "by its forward", "state", "why"),
            (
                (
                    path or "(root)",
                    stats.name,
                    stats.hits,
                    stats.training_hits,
                    stats.pending + stats.native + sum(stats.aside_reasons.values()),
                    stats.state,
                    stats.reason or stats.training_reason,
                )
                for path, stats in self.rows
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
    """One line for ``module`` and each module below it that was met: what happened, and why."""
    require_module("explain_module", module)
    loaded = sys.modules.get("eagercache.modules.manager")
    if loaded is None:
        return ModuleReport([])
    known = {id(part): row for part, row in loaded.manager.stats()}
    return ModuleReport(
        [(path, known[id(part)]) for path, part in module.named_modules() if id(part) in known]
    )
