"""Twelve whole programs through `eagercache compare`: the first process and later ones.

    python -m bench.real_programs --device cuda --modules --budget 300 --json FILE --output FILE

The programs are those of `bench/programs`; they know nothing of eagercache. Each is asked how many
steps it takes a second, and then compared over an empty cache of its own: one process with kernels
that finds nothing (first), and then pairs of a native process and one with the kernels that are
there by then (later). Rows are kept in --json, and the table is written after each program: a run
that is cut goes on where it was when it is called again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.shared import frame

FOLDER = Path(__file__).resolve().parent / "programs"
PROGRAMS = (
    "train_char_gpt",
    "train_graph",
    "train_policy",
    "train_wavenet",
    "train_diffusion",
    "train_lstm",
    "train_recommender",
    "train_clip",
    "train_mixer",
    "transcribe_speech",
    "segment_images",
    "detect_objects",
)
NOT_INSTALLED = 3  # as in programs/loop.py
COLUMNS = (
    "program", "native s", "first process", "later ones (95 %)", "memory: first, later",
    "GPU memory: first, later", "largest difference", "gain after, s", "calls by kernels",
)  # fmt: skip

Row = dict[str, Any]


class Failed(Exception):
    """The program, or its comparison, did not end as it should."""


def run(words: list[str], limit: float) -> subprocess.CompletedProcess[str]:
    """Raises Failed when it takes longer; what it runs itself has ended then too."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=FOLDER
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        process.terminate()
        process.communicate()
        raise Failed(f"not done after {limit:.0f} s") from error
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def steps_of(name: str, options: argparse.Namespace) -> int:
    """How many steps take the seconds that were asked for, natively.

    Raises Failed where it does not run.
    """
    words = [sys.executable, str(FOLDER / f"{name}.py"), *program_flags(options)]
    done = run([*words, "--calibrate", str(min(6.0, options.seconds))], options.limit)
    if done.returncode == NOT_INSTALLED:
        raise Failed(last_line(done.stdout))
    if done.returncode != 0:
        raise Failed(f"exit {done.returncode}: {last_line(done.stderr)[:200]}")
    seen = json.loads(last_line(done.stdout))
    return max(5, round(options.seconds * seen["steps"] / seen["seconds"]))


def program_flags(options: argparse.Namespace) -> list[str]:
    """What a program is told of its size."""
    return ["--device", options.device, *(["--tiny"] if options.tiny else [])]


def compared(name: str, steps: int, options: argparse.Namespace) -> Row:
    """What `eagercache compare` finds. Raises Failed."""
    words = [sys.executable, "-m", "eagercache", "compare", "--json", "--fresh"]
    words += ["--runs", str(options.runs), "--settle", str(options.settle)]
    if options.modules:
        words += ["--modules", "auto", "--training"]
    words += [str(FOLDER / f"{name}.py"), *program_flags(options), "--steps", str(steps)]
    done = run(words, options.limit)
    try:
        found: Row = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = last_line(done.stderr)[:200]
        raise Failed(f"exit {done.returncode} of eagercache compare: {said}") from None
    return found


def measure(name: str, options: argparse.Namespace) -> Row:
    """One program; a row either way."""
    began = time.monotonic()
    try:
        steps = options.steps or steps_of(name, options)
        row = {"steps": steps, "comparison": compared(name, steps, options)}
    except Failed as error:
        row = {"failed": str(error)}
    return {"program": name, **row, "seconds": time.monotonic() - began}


def ratio(one: float | None, other: float | None) -> str:
    """``one`` over ``other`` as a cell."""
    return f"{one / other:.3f}" if one is not None and other else ""


def middle(values: list[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def difference_of(output: Mapping[str, Any]) -> str:
    """The cell of what was printed."""
    counted = f"{output['numbers']} numbers"
    if output["changing"]:
        counted += f", {output['changing']} more change natively"
    if output["text"] is not None or output["missing"]:
        return f"other words or lines ({counted})"
    if output["largest"] is None:
        return f"none ({counted})"
    return f"{float(output['largest']['relative']):.1e}, in {output['differing']} of {counted}"


def cells(row: Row) -> list[str]:
    """A row of the table."""
    if "failed" in row:
        return [row["program"], row["failed"].replace("|", "/"), *[""] * (len(COLUMNS) - 2)]
    found = row["comparison"]
    native, memory = found["native_seconds"], found["memory"]
    seconds = middle(native)
    later = f"x{found['ratio']:.3f}"
    if found["ratio_low"] is not None:
        later += f" ({found['ratio_low']:.3f} to {found['ratio_high']:.3f})"
    own, gpu = middle(memory["native_bytes"]), memory["gpu_native_bytes"]
    cold = (found["progress"]["cold"] or {}).get("even", math.nan)
    gain = "never" if cold is None else "" if math.isnan(cold) else f"{cold:.1f}"
    later_gpu = ratio(memory["gpu_warm_bytes"], gpu)
    return [
        row["program"],
        f"{seconds:.1f} ({min(native):.1f} to {max(native):.1f})",
        f"x{seconds / found['cold_seconds']:.3f}",
        later,
        f"{ratio(memory['cold_bytes'], own)}, {ratio(memory['ratio'], 1.0)}",
        f"{ratio(memory['gpu_cold_bytes'], gpu)}, {later_gpu}" if later_gpu else "",
        difference_of(found["output"]),
        gain,
        str(found["hits"]) + (f", {found['not_yet']} not yet" if found["not_yet"] else ""),
    ]


def document(rows: list[Row], options: argparse.Namespace) -> str:
    """The whole file."""
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    if options.device == "cuda":
        import torch

        where += f", {torch.cuda.get_device_name()}"
    kinds = "operators and whole modules" if options.modules else "operators"
    lines = [
        f"# Whole programs with kernels of {kinds}, {options.device.upper()}, "
        f"{time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m bench.real_programs --device {options.device}"
        f"{' --modules' if options.modules else ''}{' --tiny' if options.tiny else ''}`, "
        f"pairs of processes: {options.runs}. {where}",
        "",
        "Speed is eager's time by the program's, of whole processes with their start; memory is",
        "the program's by eager's. First: the process that finds an empty cache. Gain after: the",
        "age from which on the first process was never behind eager's, by the lines of both.",
        "",
        *frame.markdown(COLUMNS, [cells(row) for row in rows]),
    ]
    return "\n".join(lines) + "\n"


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="names, with commas between; all of them if not given")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a native process")
    parser.add_argument("--steps", type=int, help="of each program; no calibration then")
    parser.add_argument("--runs", type=int, default=3, help="pairs of processes")
    parser.add_argument("--settle", type=float, default=120.0, help="as of eagercache compare")
    parser.add_argument("--modules", action="store_true", help="kernels of whole modules too")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try it out")
    parser.add_argument("--budget", type=float, help="seconds after which no program is begun")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of one program")
    parser.add_argument("--json", type=Path, help="where rows are kept; those there are not redone")
    parser.add_argument("--output", type=Path, help="the table")
    options = parser.parse_args()
    unknown = set(options.only.split(",") if options.only else ()) - set(PROGRAMS)
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """Measures; 1 where a program failed, 2 where some are left."""
    options = parsed()
    chosen = options.only.split(",") if options.only else list(PROGRAMS)
    began = time.monotonic()
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))
    # What a program asked for is made behind it, as by default, but not beside the next one.
    os.environ["EAGERCACHE_LINGER"] = str(options.settle)
    left = []
    for name in chosen:
        if any(row["program"] == name and "failed" not in row for row in rows):
            continue
        if options.budget is not None and time.monotonic() - began > options.budget:
            left.append(name)
            continue
        row = measure(name, options)
        rows = [one for one in rows if one["program"] != name] + [row]
        said = row.get("failed") or row["comparison"]["verdict"]
        print(f"{name}: {said} ({row['seconds']:.0f} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        if options.output:
            options.output.write_text(document(rows, options), encoding="utf-8")
    print(document(rows, options))
    if left:
        print(f"left: {', '.join(left)}; run it again")
        return 2
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
