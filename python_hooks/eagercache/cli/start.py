"""Where the command `eagercache` begins: its version needs nothing else."""

from __future__ import annotations

import sys

from eagercache.version import __version__


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:] == ["--version"]:
        print(f"eagercache, version {__version__}")
        return
    from eagercache.cli.main import main as run

    run(prog_name="eagercache")
