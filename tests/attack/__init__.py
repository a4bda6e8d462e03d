"""Attacks on eagercache as real processes: `scripts/attack`.

Each scene does something hostile to programs, their workers, files or limits many times over, and
counts what came of it in a row of one table.
"""
