"""Make the pictures of the documentation: terminal, report (desktop and phone) and comparison.

    python benchmarks/screenshots.py [--run RUN] [--out docs/images]

Trains the digits recipe, as `make demo` does, in a terminal of 80 columns. Writes

- terminal-train.svg and terminal.svg: the terminal in the middle of the training and at its end
- terminal-compare.svg and compare.png: `softprune compare` of the records under results/digits-methods
- report.png and report-phone.png: the report, 1000 and 390 pixels wide

With --run the report is that of a finished run, and only the report is written. Needs Chromium with chromedriver
(SOFTPRUNE_CHROMIUM and SOFTPRUNE_CHROMEDRIVER name others), selenium and Pillow.
"""

import argparse
import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser, find_browser  # noqa: E402
from terminal import in_terminal, screens_of  # noqa: E402

from softprune.lab.report import render_comparison, render_run  # noqa: E402

LARGEST = 200_000
"""Bytes of a picture."""
METHODS = sorted(file.parent for file in (ROOT / "results" / "digits-methods").glob("*/result.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished digits run; trained if not given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    found = find_browser()
    if found is None:
        raise SystemExit("The pictures need Chromium with chromedriver. Got neither on PATH.")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # The pages and the terminal name the folder of the run; a short one reads better.
        here, run = Path(folder), Path(folder) / "runs" / "digits"
        if options.run is None:
            terminal_pictures(here, options.out)
        else:
            shutil.copytree(options.run, run)
        browser = Browser(*found)
        try:
            report = render_run(run)
            picture(browser, report, options.out / "report.png", width=1000, height=1480)
            picture(browser, report, options.out / "report-phone.png", width=390, height=1900)
            if options.run is None:
                page = render_comparison(METHODS, here / "comparison.html")
                picture(browser, page, options.out / "compare.png", width=1000, height=1800)
        finally:
            browser.close()


def terminal_pictures(folder: Path, out: Path) -> None:
    """Train the digits and compare runs in a terminal, and draw its screens."""
    code, written = in_terminal(folder, "train", "digits", "--out", "runs/digits")
    if code:
        raise SystemExit(f"The demo must train. Got exit code {code}:\n{written}")
    screens = screens_of(written)
    training = [screen for screen in screens if any("━" in line and "cut" in line for line in screen)]
    draw(training[len(training) // 2], "softprune train", out / "terminal-train.svg")
    draw(screens[-1], "softprune train", out / "terminal.svg")
    _, written = in_terminal(folder, "compare", *map(str, METHODS))
    draw(screens_of(written)[-1], "softprune compare results/digits-methods", out / "terminal-compare.svg")


def draw(screen: list[str], command: str, target: Path) -> None:
    """Draw the lines of a terminal of 80 columns as SVG."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="256")
    console.print(Text(f"$ {command}", style="bold"))
    for line in screen:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    # Without the font that rich's template loads from another server.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=command), flags=re.DOTALL)
    target.write_text(drawing)
    check_size(target)


def picture(browser: Browser, page: Path, target: Path, *, width: int, height: int) -> None:
    """Write the upper part of a page as a PNG file with a palette."""
    browser.open(page, width=width)
    with tempfile.NamedTemporaryFile(suffix=".png") as whole:
        browser.screenshot(Path(whole.name))
        image = Image.open(io.BytesIO(Path(whole.name).read_bytes())).convert("RGB")
    image = image.crop((0, 0, width, min(height, image.height)))
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(target, optimize=True)
    check_size(target)


def check_size(target: Path) -> None:
    """Raise if a picture is too large for the repository."""
    size = target.stat().st_size
    print(f"{target}: {size:,} bytes")
    if size > LARGEST:
        raise SystemExit(
            f"A picture must have at most {LARGEST:,} bytes. Got {target} with {size:,}. Lower its height."
        )


if __name__ == "__main__":
    main()
