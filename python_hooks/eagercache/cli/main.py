"""The command line: programs with kernels, kernels ahead of time, and what is in a store.

Every command takes --json. Exit codes: 0 all is well, 1 something was found wrong, 2 bad usage or a
store that cannot be opened (one line says why). The modules of the commands import torch, and what
needs it, in their functions: help and completion are there at once.
"""

from __future__ import annotations

import io
import sys

import click

from eagercache.cli.groups import Lazy
from eagercache.version import __version__

_PLACES = {
    "run": ("programs", "run_command"),
    "record": ("programs", "record_command"),
    "compare": ("compare", "compare_command"),
    "estimate": ("estimate", "estimate_command"),
    "warm": ("warm", "warm_command"),
    "bundle": ("bundle", "bundle_group"),
    "pull": ("remote", "pull_command"),
    "push": ("remote", "push_command"),
    "sync": ("remote", "sync_command"),
    "stats": ("stats", "stats_command"),
    "ls": ("entries", "ls_command"),
    "show": ("entries", "show_command"),
    "verify": ("entries", "verify_command"),
    "prune": ("entries", "prune_command"),
    "clear": ("clear", "clear_command"),
    "explain": ("inspect", "explain_command"),
    "bench": ("inspect", "bench_command"),
    "bisect": ("faults", "bisect_command"),
    "doctor": ("faults", "doctor_command"),
}


@click.group(
    cls=Lazy,
    places={name: (f"eagercache.cli.{file}", what) for name, (file, what) in _PLACES.items()},
    elsewhere={name: f"bundle {name}" for name in ("keygen", "export", "import")},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="eagercache")
def main() -> None:
    """Runs programs with compiled kernels, makes kernels ahead of time, looks after their store."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be text
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
