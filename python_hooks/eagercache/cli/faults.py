"""`eagercache bisect` and `eagercache doctor`: what is at fault."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from eagercache.calls.texts import counted
from eagercache.cli.common import (
    LENGTH,
    Unusable,
    call_text,
    directory_option,
    environment_text,
    json_option,
    open_store,
    print_json,
    require_core,
    store_path,
)


@click.command("bisect", context_settings={"ignore_unknown_options": True})
@directory_option
@json_option
@click.option("--op", "ops", multiple=True, help="Suspect only operators whose name contains this.")
@click.option("--timeout", type=LENGTH, help="A run that takes longer fails (seconds).")
@click.option("--show", is_flag=True, help="Let the command's output through.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def bisect_command(
    directory: Path | None,
    as_json: bool,
    ops: tuple[str, ...],
    timeout: float | None,
    show: bool,
    command: tuple[str, ...],
) -> None:
    """Finds the operator, then the kernel, without which COMMAND passes.

    COMMAND is run with fewer and fewer of the store's kernels; it fails when its exit status is not
    0. Write -- before it. Exit code 1 when kernels are not the reason.
    """
    from eagercache.cli import bisection

    store = open_store(directory, read_only=True)
    runner = bisection.StoreWithout(
        require_core(),
        Path(store.root),
        environment_text(),
        command,
        timeout=timeout,
        quiet=not show,
    )
    entries = [
        row
        for row in store.entries(all=False)
        if not ops or any(op in row["facts"].get("op", "") for op in ops)
    ]
    try:
        found = bisection.bisect(
            entries,
            runner.passes,
            lambda text: click.echo(text, err=True),
            suspects=f" whose operator's name contains {' or '.join(ops)}" if ops else "",
        )
    except bisection.CommandMissing as problem:
        raise Unusable(str(problem)) from problem
    except bisection.NothingToFind as problem:
        if as_json:
            print_json({"problem": str(problem), "runs": runner.runs})
        else:
            click.echo(f"{problem} ({counted(runner.runs, 'run')})")
        sys.exit(1)
    if as_json:
        print_json(
            {
                "operators": found.operators,
                "kernels": [dict(entry) for entry in found.kernels],
                "runs": runner.runs,
            }
        )
        return
    click.echo(f"COMMAND passes without these kernels ({counted(runner.runs, 'run')}):")
    for entry in found.kernels:
        facts = entry["facts"]
        click.echo(f"  {entry['key'][:12]}  {facts.get('op', '?')}  {call_text(facts)}")
    click.echo(f"remedy: EAGERCACHE_SKIP={','.join(found.operators)}, and a report of the bug")


@click.command("doctor")
@directory_option
@json_option
def doctor_command(directory: Path | None, as_json: bool) -> None:
    """Checks directory, permissions, toolchain and torch.

    Says which field of the environment differs when a store that should hit does not. Exit code 1
    when something needs a remedy.
    """
    from eagercache.base import load

    if load.core is None:  # where torch cannot be imported, nor can what looks further
        from eagercache.cli.diagnoses.platform_checks import platform_checks

        checks = list(platform_checks())
    else:
        from eagercache.cli.diagnoses.diagnosis import diagnose

        checks = diagnose(store_path(directory))
    if as_json:
        print_json([check.as_dict() for check in checks])
    else:
        for check in checks:
            click.echo(f"{check.state:8} {check.name}: {check.text}")
            if check.remedy:
                click.echo(f"{'':8} remedy: {check.remedy}")
    if any(check.state == "problem" for check in checks):
        sys.exit(1)
