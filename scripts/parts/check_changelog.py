"""Whether CHANGELOG.md has an entry for the version that is released; the exit status says so.

The entry is for pyproject.toml's version, says something under headings that are known, and has a
date where the commit bears the version's tag; before that it may be "unreleased".
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def problem(changelog: str, version: str, tagged: bool) -> str:
    """What is wrong with the entry for this version; nothing where it is right."""
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    entries = [part for part in parts if part.startswith(f"[{version}]")]
    if len(entries) != 1:
        return f"there are {len(entries)} entries for {version}"
    if entries[0] != parts[0]:
        return f"the entry for {version} is not the first"
    head, _, body = entries[0].partition("\n")
    when = head.removeprefix(f"[{version}] - ").strip()
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d", when)
    if not dated and (tagged or when != "unreleased"):
        return f"the entry for {version} has no date: {when!r}"
    sections = re.split(r"^### ", body, flags=re.MULTILINE)[1:]
    if not sections:
        return f"the entry for {version} is empty"
    for section in sections:
        title, _, text = section.partition("\n")
        if title.strip() not in HEADINGS:
            return f"{title.strip()!r} is no heading of a changelog"
        if not re.search(r"^- \S", text, re.MULTILINE):
            return f"{title.strip()!r} is empty"
    return ""


def main() -> None:
    """The command line."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert found is not None
    version = found[1]
    command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
    tags = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    wrong = problem(
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, f"v{version}" in tags
    )
    sys.exit(f"CHANGELOG.md: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
