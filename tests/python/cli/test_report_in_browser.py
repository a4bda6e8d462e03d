"""The report's page in a headless Chromium, where there is one: it is drawn, and tables sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from eagercache.cli.reports import program_report, report_page

pytestmark = pytest.mark.once

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

# Clicks on the head of the column of calls, twice, and notes what is seen.
CLICKS = """
<script>
const seen = [], errors = [];
onerror = message => errors.push(message);
const table = [...document.querySelectorAll("table")].find(one => !one.closest("details"));
const names = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
const head = table.tHead.rows[0].cells[1];
for (let i = 0; i < 2; i++) { head.firstElementChild.click(); seen.push(names()); }
table.tHead.rows[0].cells[0].firstElementChild.click(); seen.push(names());
const bars = document.querySelectorAll("svg rect").length;
const colour = getComputedStyle(document.body).backgroundColor;
const wide = document.documentElement.scrollWidth > innerWidth;
document.title = JSON.stringify({seen, bars, colour, wide, errors});
</script>
"""


def call(op: str, calls: int) -> dict[str, Any]:
    return {
        **{"op": op, "dispatch_key": "CPU", "calls": calls, "hits": calls},
        **{"native_ns": 2e6, "kernel_ns": 1e6, "decision": "kernel"},
    }


def part() -> dict[str, Any]:
    compiled = {"began": 0.5, "ended": 1.5, "cpu_seconds": 1.0, "reason": "", "verdict": "kernel"}
    return {
        "wall_seconds": 4.0,
        "calls": [call("aten::b", 5), call("aten::a", 90), call("aten::c", 10)],
        **{"aside": {}, "aside_reasons": {}, "modules": {}, "compiles": 1, "failures": 0},
        **{"not_yet": 0, "compile_seconds": 1.0, "command": ["x.py"], "environment": {}},
        "timeline": {
            **{"began_at": 0.0, "seconds": 4.0, "steps": [(0, 1.0), (1, 2.0)], "step_count": 2},
            "samples": [(0.0, 0, 0), (2.0, 10, 20), (4.0, 40, 50)],
            "compiles": [{"op": "aten::a", **compiled}],
        },
    }


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
@pytest.mark.parametrize(("setting", "back"), [(1, "rgb(255, 255, 255)"), (0, "rgb(20, 24, 31)")])
def test_the_page_is_drawn_in_both_themes_and_sorts(
    tmp_path: Path, setting: int, back: str
) -> None:
    text = report_page.page_of(program_report.Report.of([part()]))
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", f"{CLICKS}</body>"))
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--blink-settings=preferredColorScheme={setting}", "--window-size=1200,900"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found is not None
    names = ["aten::a", "aten::c", "aten::b"]
    wanted = [names, names[::-1], ["aten::c", "aten::b", "aten::a"]]
    seen = json.loads(found[1])
    assert seen["seen"] == wanted and seen["errors"] == [] and not seen["wide"]
    assert seen["colour"] == back and seen["bars"] >= 3
