"""Takes the pictures of docs/screenshots; `scripts/screenshots` calls it.

python scripts/parts/screenshots.py --browser chromium [--only report,docs,notebook]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).absolute().parents[2]
TARGET = ROOT / "docs" / "screenshots"
PAGES = ROOT / "build" / "docs" / "html"
# Of Chromium's settings: what a page is told of the theme that is preferred.
THEMES = {"light": 1, "dark": 0}
_WIDTH, _HEIGHT = 1200, 3000
_MARGIN = 24
# Of a program whose page is taken; a busy machine needs it.
_LONGEST_SECONDS = 1500

# What the report is of: a training loop of small operators, and now and then a large one. Most of
# its kernels are made before, as by an earlier run; the others come while it runs.
PROGRAM = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 8)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
image = torch.randn(4096, 1024)
for step in range({steps}):
    x = torch.randn(256, 64)
    loss = torch.nn.functional.smooth_l1_loss(model(x), torch.sqrt(x.abs())[:, :8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    labels = torch.arange(65536) // 8
    if step % 50 == 0:
        torch.var(image, -1)
"""
MADE_BEFORE = ("var.correction", "native_layer_norm", "gelu_backward", "sqrt", "smooth_l1_loss")
OPERATORS = (*MADE_BEFORE, "abs", "gelu", "smooth_l1_loss_backward", "floor_divide")
STEPS = 8000


def take(browser: str, page: Path, name: str, *, most: int = _HEIGHT) -> None:
    """A page in both themes, cut where it ends, in 256 colours."""
    for theme, setting in THEMES.items():
        path = TARGET / f"{name}-{theme}.png"
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                    f"--user-data-dir={profile}",
                    f"--window-size={_WIDTH},{most}",
                    f"--blink-settings=preferredColorScheme={setting}",
                    *("--virtual-time-budget=3000", f"--screenshot={path}", page.as_uri()),
                ],
                check=True,
                timeout=120,
                stderr=subprocess.DEVNULL,
            )
        with Image.open(path) as taken:
            picture = taken.convert("RGB")
        back = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
        box = ImageChops.difference(picture, back).getbbox()
        height = min(picture.height, box[3] + _MARGIN) if box else picture.height
        picture.crop((0, 0, picture.width, height)).quantize(256).save(path, optimize=True)
        print(f"docs/screenshots/{path.name}: {path.stat().st_size >> 10} KB")


def report(folder: Path) -> Path:
    """The report of the program above."""
    _run_program(folder, 2, MADE_BEFORE, "--on-miss", "wait")
    shown = ("--report", "--page", "page.html", "--picture", "picture.svg")
    _run_program(folder, STEPS, OPERATORS, *shown)
    return folder / "page.html"


def _run_program(folder: Path, steps: int, operators: tuple[str, ...], *options: str) -> None:
    (folder / "train.py").write_text(PROGRAM.format(steps=steps))
    named = (word for name in operators for word in ("--op", name))
    subprocess.run(
        [sys.executable, "-m", "eagercache", "run", *options, *named, "train.py"],
        cwd=folder,
        env={
            **os.environ,
            "EAGERCACHE_DIR": str(folder / "cache"),
            "EAGERCACHE_LINGER": "0",
            "OMP_NUM_THREADS": "1",  # a core is left for compiling
        },
        check=True,
        timeout=_LONGEST_SECONDS,
        stderr=subprocess.DEVNULL,
    )


def notebook(folder: Path) -> Path:
    """The notebook of examples/, run over an empty cache."""
    page = folder / "notebook.html"
    subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "parts" / "notebook_page.py")),
            *(str(ROOT / "examples" / "see_modules.ipynb"), str(page)),
        ],
        env={**os.environ, "EAGERCACHE_DIR": str(folder / "cache")},
        check=True,
        timeout=_LONGEST_SECONDS,
    )
    return page


def main() -> None:
    """Takes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--only", default="report,docs,notebook")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eagercache-screenshots-") as name:
        folder = Path(name)
        if "report" in wanted:
            take(arguments.browser, report(folder), "report")
        if "docs" in wanted:
            take(arguments.browser, PAGES / "index.html", "docs", most=1000)
            take(arguments.browser, PAGES / "figures.html", "figures", most=2000)
        if "notebook" in wanted:
            take(arguments.browser, notebook(folder), "notebook", most=4000)


if __name__ == "__main__":
    main()
