"""`python -m eagercache`: the command line."""

from __future__ import annotations

from eagercache.cli.start import main

main()
