"""`python -m eagercache`: the command line."""

from __future__ import annotations

from eagercache.cli.main import main

main(prog_name="eagercache")
