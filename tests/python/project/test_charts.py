"""The charts of docs/figures.md are what the tables of bench/results say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCRIPT = ROOT / "bench" / "charts.py"


@pytest.fixture(autouse=True)
def sources() -> None:
    if not SCRIPT.exists():
        pytest.skip("no sources beside the package")
    pytest.importorskip("matplotlib")


def test_each_chart_is_what_its_table_says() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_figures_shows_every_chart_in_both_themes() -> None:
    page = (ROOT / "docs" / "figures.md").read_text()
    shown = re.findall(
        r"```\{image\} charts/(\S+)-(light|dark).svg\n:alt: .+\n:class: only-\2", page
    )
    drawn = {path.stem for path in (ROOT / "docs" / "charts").glob("*.svg")}
    assert {"-".join(names) for names in shown} == drawn
