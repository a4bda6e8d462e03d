"""A whole program natively, while its kernels are made, and by turns: speed, and memory of a GPU.

    python -m bench.compiling.beside_programs train_char_gpt [--device cuda] [--seconds 60]
                                              [--tiny] [--output X.md]

The programs are those of `bench/programs`, unchanged, each in a process of its own over an empty
cache. After some native seconds operators and whole modules have kernels made, in training too; the
speed of each two seconds is a share of the native one before. Then steps with and without kernels
take turns. Peaks are what PyTorch had allocated on the GPU at most.

Two figures stand beside them that no kernel of ours has a part in: the program's speed beside eight
processes that spin with niceness 19, and natively once more after those. A program whose speed
changes there changes beside compile workers, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.shared import frame

FOLDER = frame.ROOT / "bench" / "programs"
WINDOW, NATIVE_SECONDS, TURN_SECONDS, TURNS, SPINNERS = 2.0, 6.0, 3.0, 3, 8
COLUMNS = (
    "program",
    "native steps/s",
    "beside spinners, native again",
    "while kernels are made: median, worst",
    "seconds",
    "by turns",
    "compiles, not done",
    "GPU MiB: native, meanwhile, without and with kernels",
)


class Measured(Exception):
    """The program has run for as long as it had to."""


class Steps:
    """Takes the place of a program's own loop. ``options`` as below."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._step = 0
        self._rates: list[float] = []
        self.found: dict[str, Any] = {}

    def __call__(self, program: Any) -> Iterator[int]:
        """The numbers of the steps, as long as something is measured. Raises Measured."""
        yield from self._run(WINDOW)
        self._peak()
        native = yield from self._rate(NATIVE_SECONDS)
        self.found["native"], self.found["peaks"] = native, [self._peak()]
        words = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
        spinners = [subprocess.Popen(words) for _ in range(SPINNERS)]
        try:
            beside = yield from self._rate(NATIVE_SECONDS)
        finally:
            for spinner in spinners:
                spinner.kill()
                spinner.wait()
        again = yield from self._rate(NATIVE_SECONDS)
        self.found["surroundings"] = [beside / native, again / native]
        yield from self._enabled(again)
        raise Measured

    def _enabled(self, native: float) -> Iterator[int]:
        import eagercache
        from eagercache.base.load import core

        assert core is not None
        eagercache.enable(modules="auto", training=True)
        begin = time.perf_counter()
        windows: list[float] = []
        while time.perf_counter() - begin < self._options.seconds:
            rate = yield from self._rate(WINDOW)
            windows.append(rate / native)
        self.found["windows"], self.found["seconds"] = windows, time.perf_counter() - begin
        counted = eagercache.stats()
        self.found["compiles"] = [counted.compiles, counted.outstanding]
        self.found["peaks"].append(self._peak())
        rates: list[list[float]] = [[], []]
        peaks = [0, 0]
        for _ in range(TURNS):
            for with_kernels in (False, True):
                core.set_modules_active(with_kernels)
                core.set_answering(with_kernels)
                yield from self._run(0.0)  # what the other side has left is let go
                self._peak()
                rate = yield from self._rate(TURN_SECONDS)
                rates[with_kernels].append(rate)
                peaks[with_kernels] = max(peaks[with_kernels], self._peak())
        self.found["ratios"] = [b / a for a, b in zip(*rates, strict=True)]
        self.found["peaks"] += peaks

    def _run(self, seconds: float) -> Iterator[int]:
        begin = time.perf_counter()
        while True:
            yield self._step
            self._step += 1
            if time.perf_counter() - begin >= seconds:
                return

    def _rate(self, seconds: float) -> Any:
        """Steps a second; a generator of the steps."""
        first, begin = self._step, time.perf_counter()
        yield from self._run(seconds)
        self._synchronize()
        return (self._step - first) / (time.perf_counter() - begin)

    def _synchronize(self) -> None:
        import torch

        if self._options.device == "cuda":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        """MiB since the last time; 0 on CPU."""
        import torch

        if self._options.device != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated() >> 20
        torch.cuda.reset_peak_memory_stats()
        return int(peak)


def run_program(options: argparse.Namespace) -> None:
    """Runs in a process of its own; prints what it measured."""
    sys.path.insert(0, str(FOLDER))
    sys.argv = [options.programs, "--device", options.device, *(["--tiny"] if options.tiny else [])]
    loop: Any = importlib.import_module("loop")
    steps = Steps(options)
    loop.Program.each_step = lambda program: steps(program)
    loop.Program.says = lambda program, step: False
    try:
        importlib.import_module(options.programs).main()
    except Measured:
        print(json.dumps(steps.found), flush=True)
    os._exit(0)  # nothing more is made


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    words = [sys.executable, "-m", "bench.compiling.beside_programs", name, "--run"]
    words += ["--device", options.device, "--seconds", str(options.seconds)]
    words += ["--tiny"] if options.tiny else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        environment = {**os.environ, "EAGERCACHE_DIR": store, "EAGERCACHE_LINGER": "0"}
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    ratios, windows = found["ratios"], found["windows"]
    return [
        name,
        f"{found['native']:.1f}",
        ", ".join(f"{share:.2f}" for share in found["surroundings"]),
        f"{statistics.median(windows):.2f}, {min(windows):.2f}",
        f"{found['seconds']:.0f}",
        f"x{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
        ", ".join(map(str, found["compiles"])),
        ", ".join(map(str, found["peaks"])),
    ]


def main() -> int:
    """Reads the options, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("programs", help="names, with commas between")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which kernels are made")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try this out")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_program(options)
        return 0
    rows = [measure(name, options) for name in options.programs.split(",")]
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    head = f"# Programs while their kernels are made, {options.device.upper()}"
    frame.write(
        "\n".join([head, "", where, "", *frame.markdown(COLUMNS, rows), ""]), options.output
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
