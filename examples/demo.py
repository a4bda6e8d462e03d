"""The main job of eagercache on a real model, on CPU: ``make demo``.

1. The model runs natively and is timed.
2. eagercache is switched on over a cache (empty at the first run): native answers while kernels are
   compiled and measured in other processes, and those that win take over.
3. A second process runs the model from the cache that the first one left, compiling nothing.
4. Another model as a whole: one kernel for all of it.

After the third comes a table of the operators that were met. Every time in it was measured on this
machine; the two columns per operator are those that the decision was made from, and the table says
so when that was in an earlier run. ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_module
import demo_report as report
import eagercache
import timm
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = Path(__file__).resolve().parent.parent
SEED = 1
# Enough passes for a stable median, few enough for a demo: seconds with the default model.
WARM_UP_PASSES = 5
ROUNDS = 40
# On a busy machine a pass may take many times as long; the demo then makes do with fewer.
MAX_TIMING_S = 15.0
MIN_ROUNDS = 9
PASS_EVERY_S = 2.0
# Where a kernel for all sizes loses at one of them, that size gets a kernel of its own once it has
# been called so often: a decision that is still to come after all others.
SETTLED_PASSES = 40


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Native, then eagercache, then a second process.")
    parser.add_argument("--model", default="poolformer_s12", help="a timm model's name")
    parser.add_argument("--batch", type=int, default=1, help="images a pass")
    parser.add_argument("--fresh", action="store_true", help="start from an empty cache")
    parser.add_argument("--cache", type=Path, default=PROJECT / "build" / "demo-cache")
    parser.add_argument("--output", type=Path, default=PROJECT / "demo_output")
    parser.add_argument(
        "--limit", type=float, default=90.0, help="seconds to wait for kernels, at most"
    )
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(name: str, batch: int) -> Callable[[], torch.Tensor]:
    """Return the forward pass of a model with random weights on one input of its real size."""
    torch.manual_seed(SEED)
    model = timm.create_model(name, pretrained=False).eval()
    images = torch.randn(batch, *model.default_cfg["input_size"])
    return lambda: model(images)


def error_bound(name: str, batch: int, native: torch.Tensor) -> float:
    """Return how far an output may be from native's, by this model's own rounding.

    A kernel may have twice native's error against a more precise reference; the whole model is held
    to the same: native's error and twice that, plus a unit in the last place of the largest value.
    """
    torch.manual_seed(SEED)
    model = timm.create_model(name, pretrained=False).eval()
    images = torch.randn(batch, *model.default_cfg["input_size"])
    precise = model.double()(images.double())
    native_error = (native.double() - precise).abs().max().item()
    unit = native.abs().max().item() * torch.finfo(native.dtype).eps
    return 3.0 * native_error + unit


def rounds() -> Iterator[int]:
    """Count the rounds of a measurement, which ends early when it takes too long."""
    begin = time.perf_counter()
    for count in range(ROUNDS):
        if count >= MIN_ROUNDS and time.perf_counter() - begin > MAX_TIMING_S:
            return
        yield count


def timed(forward: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one pass."""
    begin = time.perf_counter()
    forward()
    return time.perf_counter() - begin


class CallRecorder(TorchDispatchMode):
    """Counts the operator calls that reach the backend, by operator and layout of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[report.CallSite] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the call and let it go on."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        layout = tuple((tuple(tensor.shape), tuple(tensor.stride())) for tensor in tensors)
        schema = func._schema
        self.calls[schema.name, schema.overload_name, layout] += 1
        return func(*args, **(kwargs or {}))


def calls_of_one_pass(forward: Callable[[], torch.Tensor]) -> Counter[report.CallSite]:
    """Return how often each operator is called in one pass, with which tensors."""
    # In inference mode a dispatch mode sees operators before they are taken apart.
    with torch.inference_mode(mode=False), torch.no_grad(), CallRecorder() as recorder:
        forward()
    return recorder.calls


def interleave(
    forward: Callable[[], torch.Tensor], cache: Path
) -> tuple[report.Timing, report.Timing]:
    """Time passes without and with eagercache, in turn, so that both see the same machine."""
    native: list[float] = []
    cached: list[float] = []
    for _ in rounds():
        eagercache.disable()
        native.append(timed(forward))
        eagercache.enable(cache_dir=cache)
        cached.append(timed(forward))
    return report.Timing.of(native), report.Timing.of(cached)


def show_progress(progress: Progress, task: TaskID, state: str) -> None:
    """Show how many of the calls that were met have their decision."""
    known = len(eagercache.kernels())
    progress.update(
        task, total=known + eagercache.stats().outstanding, completed=known, state=state
    )


def settled(forward: Callable[[], torch.Tensor]) -> bool:
    """Whether further passes, made here, ask for nothing more."""
    before = eagercache.stats()
    begin = time.perf_counter()
    for _ in range(SETTLED_PASSES):
        forward()
        if time.perf_counter() - begin > MAX_TIMING_S:
            break
    after = eagercache.stats()
    asked = after.compiles + after.failures - before.compiles - before.failures
    return asked == 0 and after.outstanding == 0


def fill_cache(
    forward: Callable[[], torch.Tensor], console: Console, limit: float
) -> tuple[float, bool]:
    """Let kernels arrive while the model goes on; return the seconds and whether all came."""
    begin = time.perf_counter()
    columns = (
        TextColumn("  decisions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    # A key is compiled when it has been met more than once, so a few passes hand over all of them.
    for _ in range(3):
        forward()
    complete = False
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("decisions", state="")
        while not complete and time.perf_counter() - begin < limit:
            hits = eagercache.stats().hits
            seconds = timed(forward)
            hits = eagercache.stats().hits - hits
            show_progress(
                progress, task, f"a pass meanwhile: {1e3 * seconds:.1f} ms, {hits} calls by kernels"
            )
            complete = eagercache.wait(timeout=PASS_EVERY_S) and settled(forward)
        show_progress(progress, task, "")
    return time.perf_counter() - begin, complete


def second_process(options: argparse.Namespace) -> None:
    """Run the model over the cache that another process left; write what was seen as JSON."""
    forward = make_model(options.model, options.batch)
    calls = calls_of_one_pass(forward)
    with torch.inference_mode():
        native_output = forward()
        bound = error_bound(options.model, options.batch, native_output)
        eagercache.enable(cache_dir=options.cache)
        begin = time.perf_counter()
        for _ in range(WARM_UP_PASSES):
            forward()
            eagercache.wait(timeout=PASS_EVERY_S)
        ready = time.perf_counter() - begin
        output = forward()
        native, cached = interleave(forward, options.cache)
        # What so many calls asked for is counted, and its keys are known.
        eagercache.wait(timeout=MAX_TIMING_S)
        stats = eagercache.stats()
        eagercache.disable()
        difference = (output - native_output).abs().max().item()
    result = report.SecondProcess(
        native=native,
        cached=cached,
        difference=difference,
        bound=bound,
        ready_s=ready,
        hits=stats.hits,
        compiles=stats.compiles,
        failures=stats.failures,
        digests=[kernel.digest for kernel in eagercache.kernels()],
        rows=report.rows_of(eagercache.kernels(), calls),
    )
    options.answer.write_text(json.dumps(asdict(result)))


def run_apart(script: str, *options: str) -> Any:
    """Run a script in a process of its own; return what it writes, as JSON, where --answer says."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        subprocess.run([sys.executable, script, *options, f"--answer={answer}"], check=True)
        return json.loads(answer.read_text())


def first_process(
    forward: Callable[[], torch.Tensor],
    console: Console,
    options: argparse.Namespace,
    *,
    kept: bool,
) -> tuple[eagercache.Stats, set[str]]:
    """Run until every kernel is decided on; return the counts, and the digests of the kernels."""
    state = "the cache of an earlier run (--fresh empties it)" if kept else "an empty cache"
    console.print(f"\n[bold]2. eagercache on {state}[/]")
    eagercache.enable(cache_dir=options.cache)
    seconds, complete = fill_cache(forward, console, options.limit)
    first = eagercache.stats()
    known = {kernel.digest for kernel in eagercache.kernels()}
    eagercache.disable()
    console.print(
        f"  {seconds:.0f} s until every decision was there: {first.compiles} compiles, "
        f"{first.failures} failed, {first.hits} calls answered by kernels so far"
        if complete
        else f"  not everything was decided within {options.limit:.0f} s: {first.compiles} compiles"
    )
    return first, known


def main() -> int:
    """Run the demo; 0 when everything was answered within its bound and nothing compiled twice."""
    options = parse_arguments()
    if options.answer is not None:
        second_process(options)
        return 0

    console = Console(highlight=False)
    if options.fresh and options.cache.exists():
        shutil.rmtree(options.cache)
    forward = make_model(options.model, options.batch)
    console.print(
        f"[bold]{options.model}[/], batch {options.batch}, inference, torch {torch.__version__}, "
        f"{report.processor()}, {torch.get_num_threads()} threads of {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}"
    )

    load = os.getloadavg()[0]
    if load > 0.5 * (os.cpu_count() or 1):
        console.print(f"[yellow]Other work is running (load {load:.1f}): times are unsteady.[/]")

    with torch.inference_mode():
        console.print("\n[bold]1. Native[/]")
        for _ in range(WARM_UP_PASSES):
            forward()
        native = report.Timing.of([timed(forward) for _ in rounds()])
        console.print(f"  {native}")
        # A folder from an earlier run holds verdicts; what they cost was paid there.
        kept = options.cache.exists() and any(options.cache.iterdir())
        first, known = first_process(forward, console, options, kept=kept)

    console.print("\n[bold]3. A second process, on the cache that the first one left[/]")
    same = (f"--model={options.model}", f"--batch={options.batch}", f"--cache={options.cache}")
    second = report.SecondProcess.of(run_apart(__file__, *same))
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / f"{options.model}.png"
    outcome = report.Outcome(
        title=f"{options.model}, batch {options.batch}, torch {torch.__version__}",
        kept=kept,
        first_compiles=first.compiles,
        second=second,
    )
    report.print_outcome(console, outcome)
    report.save_picture(picture, outcome)
    console.print(f"\nThe table as a picture: {picture}")

    console.print("\n[bold]4. A whole model as one kernel[/]")
    whole = demo_module.WholeModel.of(run_apart(demo_module.__file__, f"--cache={options.cache}"))
    console.print(f"  {whole.name}")
    for line in whole.lines():
        console.print(f"  {line}", soft_wrap=True)

    if second.difference > second.bound or whole.difference > whole.bound:
        console.print("[bold red]The outputs differ by more than their bound.[/]")
        return 1
    if second.compiled_again(known):
        console.print("[bold red]The second process compiled what was in the cache.[/]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
