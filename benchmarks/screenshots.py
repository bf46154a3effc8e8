"""Make the pictures of the documentation: docs/images/report.png, report-phone.png and compare.png.

    python benchmarks/screenshots.py [--run RUN] [--out docs/images]

Without --run the digits recipe is trained first. The comparison is of the records under results/digits-methods. Needs
Chromium with chromedriver (SOFTPRUNE_CHROMIUM and SOFTPRUNE_CHROMEDRIVER name others), selenium and Pillow.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser, find_browser  # noqa: E402

from softprune.methods import REGISTRY  # noqa: E402
from softprune.report import render_comparison, render_run  # noqa: E402

LARGEST = 200_000
"""Bytes of a picture."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a finished digits run; trained if not given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    found = find_browser()
    if found is None:
        raise SystemExit("The pictures need Chromium with chromedriver. Got neither on PATH.")
    options.out.mkdir(parents=True, exist_ok=True)
    browser = Browser(*found)
    try:
        with tempfile.TemporaryDirectory() as folder:
            # The page names the folder of the run; a short one reads better.
            run = Path(folder) / "runs" / "digits"
            if options.run is None:
                subprocess.run(
                    [sys.executable, "-m", "softprune", "train", "digits", "--out", str(run)], check=True
                )
            else:
                shutil.copytree(options.run, run)
            titles = {name: entry.title for name, entry in REGISTRY.items()}
            report = render_run(run, titles=titles)
            picture(browser, report, options.out / "report.png", width=1000, height=1480)
            picture(browser, report, options.out / "report-phone.png", width=390, height=1900)
            runs = sorted(file.parent for file in (ROOT / "results" / "digits-methods").glob("*/result.json"))
            page = render_comparison(runs, Path(folder) / "comparison.html", titles)
            picture(browser, page, options.out / "compare.png", width=1000, height=1800)
    finally:
        browser.close()


def picture(browser: Browser, page: Path, target: Path, *, width: int, height: int) -> None:
    """Write the upper part of a page as a PNG file with a palette."""
    browser.open(page, width=width)
    with tempfile.NamedTemporaryFile(suffix=".png") as whole:
        browser.screenshot(Path(whole.name))
        image = Image.open(io.BytesIO(Path(whole.name).read_bytes())).convert("RGB")
    image = image.crop((0, 0, width, min(height, image.height)))
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(target, optimize=True)
    size = target.stat().st_size
    print(f"{target}: {size:,} bytes")
    if size > LARGEST:
        raise SystemExit(
            f"A picture must have at most {LARGEST:,} bytes. Got {target} with {size:,}. Lower its height."
        )


if __name__ == "__main__":
    main()
