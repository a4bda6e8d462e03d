"""`python -m eagercache`: the command line."""

from __future__ import annotations

from eagercache.cli import main

main(prog_name="eagercache")
