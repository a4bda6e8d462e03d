"""The report of `eagercache run --report` as a picture: native time and time now, by operator."""

from __future__ import annotations

from pathlib import Path

from eagercache.cli.reports.program_report import MOST_ROWS, Report


def save_picture(report: Report, path: Path) -> str:
    """Draws where the time goes. What hinders it, with the remedy, or "" when it is drawn."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no picture was drawn: matplotlib is not installed (pip install matplotlib)"
    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.shown_rows() if row.native > 0][:MOST_ROWS]
    if not rows:
        return "no picture was drawn: no call of a hooked operator was timed"
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    places = range(len(rows))
    axes.barh(places, [1e3 * row.native for row in rows], color="#c8c8c8", label="native")
    axes.barh(places, [1e3 * row.now for row in rows], height=0.45, color="#2b6cb0", label="now")
    axes.set_yticks(list(places), [row.op for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds in the run")
    axes.set_title("hooked operators: all native, and as they ran")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        return f"no picture was drawn: {path} cannot be written ({error.strerror})"
    except ValueError as error:
        return f"no picture was drawn: {error}"
    finally:
        pyplot.close(figure)
    return ""
