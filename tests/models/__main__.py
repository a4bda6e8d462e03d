"""`make models`: real models with kernels of operators, and of modules, against native.

python -m models [--kind operators|modules|training] [--only WORDS] [--json FILE]
                 [--steps 200] [--runs 5] [--output FILE.md] [--resume] [--jobs N [--seconds S]]

`--kind training` is long runs of training with kernels of modules (`steps`), with a table. With
`--resume` the models that the JSON file holds as they should be are not trained again; with
`--jobs` that many models are trained at a time, each in a process and on a thread of its own
(`side_by_side`); `--seconds 0` with it only puts together what there is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any


def train(names: list[str], options: argparse.Namespace) -> int:
    """The exit status: 1 where a model is past eager's spread or no kernel answered."""
    import torch

    from models import side_by_side, steps

    began, failed, results = time.monotonic(), 0, _known(options)
    known = {row.name for row in results}
    if options.jobs > 1:
        return _train_side_by_side([name for name in names if name not in known], options)
    for name in names:
        if name in known:
            continue
        began_one = time.monotonic()
        try:
            result = steps.training(name, options.steps, options.runs)
        except Exception as error:
            text = str(error).splitlines() or [""]
            print(f"training {name}: {type(error).__name__}: {text[0][:200]}", flush=True)
            failed += 1
            continue
        bad = bool(result.problems) or not result.answered["hits"]
        failed += bad
        results.append(result)
        said = "PAST THE SPREAD" if result.problems else "NO HIT" if bad else "within"
        print(
            f"training {name:34} {said}, {result.ratio:.2f} of eager's spread, "
            f"{dict(result.answered)}, {time.monotonic() - began_one:.0f} s",
            *(f"\n    {problem}" for problem in result.problems),
            flush=True,
        )
        if options.json:
            rows = [asdict(row) for row in results]
            side_by_side.write(options.json, torch.__version__, options.steps, rows)
    print(
        f"training: {len(names) - failed} of {len(names)} models within the spread of eager runs, "
        f"{options.steps} steps, {time.monotonic() - began:.0f} s, torch {torch.__version__}"
    )
    lines = steps.table(results, options.steps)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


def _train_side_by_side(names: list[str], options: argparse.Namespace) -> int:
    """The exit status: 1 where a model has no answer, is past the spread or had no kernel."""
    import torch

    from models import side_by_side, steps

    side_by_side.train(
        names, options.jobs, options.seconds, options.steps, options.runs, options.json
    )
    found = side_by_side.merged(options.json, torch.__version__, options.steps)
    rows = [steps.Result(**row) for row in found]
    side_by_side.write(options.json, torch.__version__, options.steps, found)
    if options.output:
        options.output.write_text("\n".join(steps.table(rows, options.steps)) + "\n")
    good = {row.name for row in rows if not row.problems and row.answered["hits"]}
    print(
        f"training: {len(good)} models within the spread of {len(rows)} trained, "
        f"{options.steps} steps, torch {torch.__version__}"
    )
    return 1 if set(names) - good else 0


def _known(options: argparse.Namespace) -> list[Any]:
    """What an earlier run found, of models that were within the spread."""
    import torch

    from models import side_by_side, steps

    if not options.resume or options.json is None:
        return []
    found = side_by_side.merged(options.json, torch.__version__, options.steps)
    rows = [steps.Result(**row) for row in found]
    return [row for row in rows if not row.problems and row.answered["hits"]]


def main() -> int:
    """The exit status: 1 where a model differs or no kernel answered."""
    import eagercache  # noqa: F401
    import torch

    from models import equality, zoo

    parser = argparse.ArgumentParser(prog="make models", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--kind", choices=("operators", "modules", "training"), help="by default the first two"
    )
    parser.add_argument("--only", default="", help="models with one of these words, by commas")
    parser.add_argument("--model", help="the one model of this name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="trained at a time; needs --json")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end then; for --jobs")
    parser.add_argument("--runs", type=int, default=5, help="of eager in training, five at least")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--output", type=Path, help="where training's table goes, as Markdown")
    parser.add_argument("--resume", action="store_true", help="go on with the JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = [word for word in options.only.split(",") if word]
    names = [n for n in zoo.available() if not words or any(word in n for word in words)]
    if options.model:
        names = [options.model]
    if options.jobs > 1 and not options.json:
        parser.error("--jobs needs --json")
    if options.kind == "training":
        return train(names, options)
    left_out = sorted({name.partition(" ")[0] for name in zoo.MODELS.keys() - set(zoo.available())})
    failed, rows = 0, []
    for kind in [options.kind] if options.kind else ["operators", "modules"]:
        began, tensors, hits = time.monotonic(), 0, 0
        for result in equality.run(kind, names):
            bad = bool(result.problems) or not result.answered.get("hits")
            failed += bad
            tensors += result.tensors
            hits += result.answered.get("hits", 0)
            rows.append({"kind": kind, **asdict(result)})
            said = "DIFFERS" if result.problems else "NO HIT" if bad else "equal"
            print(
                f"{kind} {result.name:34} {said}"
                f" {result.tensors} tensors, error {result.ratio:.2f} of native's, "
                f"{dict(result.answered)}",
                flush=True,
            )
            for problem in result.problems[:5]:
                print(f"    {problem}")
        equal = sum(r["kind"] == kind and not r["problems"] for r in rows)
        print(
            f"{kind}: {equal} of {len(names)} models equal, {tensors} tensors, {hits} hits, "
            f"{time.monotonic() - began:.0f} s, torch {torch.__version__}"
            + (f"; not installed: {', '.join(left_out)}" if left_out else "")
        )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
