"""What the Python benchmarks share: pairs by turns on one core, medians, and where it was measured.

A benchmark is a script with functions to compare. It hands them to `compare`, which calls them by
turns in this process, so that a disturbance of the machine meets all of them, and to `main`, which
prints a table or, with --json, everything.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Nothing compiles behind what is measured next.
os.environ.setdefault("EAGERCACHE_LINGER", "0")


@dataclass(frozen=True)
class Figure:
    """One thing that was measured.

    Attributes:
        name: what, such as "abs hit".
        ns: the median over rounds of one call's mean, in nanoseconds.
        low, high: the quartiles, the same way.
        ratio: the median over rounds of this one's time divided by the first one's, None for the
            first one itself.
        rounds, calls: how many rounds of how many calls.
        more: nanoseconds over the first one, as `median_within` gives them for the differences of
            each round; None where rounds are no pairs.
    """

    name: str
    ns: float
    low: float
    high: float
    ratio: float | None
    rounds: int
    calls: int
    more: tuple[float, float, float] | None = None


def pin() -> int:
    """Binds the process to one core, the last one it may use, and torch to one thread."""
    import torch

    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    return core


def one_round(function: Callable[[], Any], calls: int) -> float:
    """Nanoseconds a call, the mean of ``calls``."""
    repeat = range(calls)
    begin = time.perf_counter_ns()
    for _ in repeat:
        function()
    return (time.perf_counter_ns() - begin) / calls


def compare(
    functions: Mapping[str, Callable[[], Any]], *, rounds: int = 40, calls: int = 2000
) -> list[Figure]:
    """Times each function; all of them once a round, in turn. The first is what others relate to.

    The loop's own price, about 20 ns a call, is in every figure alike.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        one_round(function, calls)
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(one_round(function, calls))
    first = next(iter(functions))
    figures = []
    for name, values in times.items():
        low, median, high = quartiles(values)
        ratios = [mine / base for mine, base in zip(values, times[first], strict=True)]
        ratio = None if name == first else statistics.median(ratios)
        figures.append(Figure(name, median, low, high, ratio, rounds, calls))
    return figures


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of at least two values, in order."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def median_within(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of an interval that holds the true one in 95 of 100 cases.

    The ends are values themselves, by rank: nothing is assumed of how they spread. Of fewer than
    six, no interval is that sure, and the ends are the least and the largest.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return statistics.median(ordered), ordered[outside], ordered[count - 1 - outside]


def machine() -> dict[str, Any]:
    """Where this was measured: processor, load, versions, commit."""
    import torch

    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The checked out commit, with a plus sign when files differ from it.

    Where there is no git, EAGERCACHE_COMMIT says it.
    """
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or os.environ.get("EAGERCACHE_COMMIT", "unknown")


def block(call: Callable[[], Any], calls: int, device: str) -> tuple[float, float]:
    """(milliseconds of one call, those of the host alone), the mean of ``calls``.

    The first is until the device has ended, the second until all calls have returned.
    """
    import torch

    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - begin
    synchronize()
    return (time.perf_counter() - begin) / calls * 1e3, host / calls * 1e3


BLOCK_COLUMNS = ("ms", "quartiles", "host ms", "eager's / its")


def block_rows(label: str, sides: Mapping[str, Sequence[tuple[float, float]]]) -> list[list[str]]:
    """A row for each side of what `block` gave: label, side, then BLOCK_COLUMNS."""
    eager = statistics.median(wall for wall, _ in sides["eager"])
    rows = []
    for side, pairs in sides.items():
        low, middle, high = quartiles([wall for wall, _ in pairs])
        host = statistics.median(host for _, host in pairs)
        spread = f"{low:.3f} to {high:.3f}"
        rows.append([label, side, f"{middle:.3f}", spread, f"{host:.3f}", f"x{eager / middle:.2f}"])
    return rows


def command(script: str | Path) -> list[str]:
    """Runs a benchmark, named by its file, in another process: as a module, in the folder ROOT."""
    name = Path(script).resolve().relative_to(ROOT).with_suffix("")
    return [sys.executable, "-m", ".".join(name.parts)]


def run_binary(
    program: Path, cores: set[int], *options: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A Google Benchmark binary that ran on ``cores``, with its JSON. Ends where it failed."""
    done = subprocess.run(
        [str(program), *options, "--benchmark_format=json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode != 0:
        raise SystemExit(f"{program.name} failed:\n{done.stderr}")
    return done


def in_process(script: str, *options: str, **settings: str) -> Any:
    """What ``script`` prints as its last line, in JSON, when it is run in a fresh process.

    ``settings`` join its environment. This program ends where that one fails.
    """
    done = subprocess.run(
        [*command(script), *options],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = " ".join([Path(script).name, *options])
        raise SystemExit(f"{words}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def as_json(title: str, figures: Iterable[Figure]) -> dict[str, Any]:
    """A result as it is written by --json."""
    return {"title": title, "machine": machine(), "figures": [asdict(f) for f in figures]}


def print_tables(results: Iterable[Mapping[str, Any]]) -> None:
    """The figures of one or several results for people, as one table."""
    from rich.console import Console
    from rich.table import Table

    where: Mapping[str, Any] = {}
    table = Table(width=116)
    table.add_column("", no_wrap=True, ratio=1)
    for heading in ("median", "quartiles", "to first", "over the first, 95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        where = result["machine"]
        table.add_section()
        table.add_row(result["title"], style="bold")
        for figure in result["figures"]:
            unit, scale = _unit(figure["ns"])
            ratio = "" if figure["ratio"] is None else f"x{figure['ratio']:.2f}"
            low, median, high = (_short(figure[part] / scale) for part in ("low", "ns", "high"))
            more = ""
            if figure.get("more"):
                over, least, most = (value / scale for value in figure["more"])
                more = f"{_signed(over)} ({_signed(least)} to {_signed(most)}) {unit}"
            table.add_row(f"  {figure['name']}", f"{median} {unit}", f"{low}-{high}", ratio, more)
    Console(width=120).print(table, markup=False)
    if where:
        print(
            f"{where['processor']}, {where['cores']} cores, load {where['load']}; torch "
            f"{where['torch']}, Python {where['python']}; commit {where['commit']}, {where['date']}"
        )


def _unit(ns: float) -> tuple[str, float]:
    """The unit that a time is printed in, and how many nanoseconds it has."""
    for unit, scale in (("ns", 1.0), ("us", 1e3), ("ms", 1e6)):
        if ns < 10_000 * scale:
            return unit, scale
    return "s", 1e9


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}"


def _signed(number: float) -> str:
    return f"{'-' if number < 0 else '+'}{_short(abs(number))}"


def write(text: str, output: Path | None) -> None:
    """Prints a text, and writes it to the file that --output named."""
    print(text)
    if output:
        output.write_text(text, encoding="utf-8")


def show(result: Mapping[str, Any], as_json: bool) -> None:
    """Prints a result, as --json wants it or as a table."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_tables([result])


def main(title: str, measure: Callable[[argparse.Namespace], list[Figure]]) -> None:
    """The command line of a benchmark: --json, --rounds, --calls."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of calls by turns")
    parser.add_argument("--calls", type=int, default=2000, help="calls a round")
    options = parser.parse_args()
    pin()
    show(as_json(title, measure(options)), options.json)
