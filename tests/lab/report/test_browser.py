"""The pages in a real headless Chromium: no errors, working interaction, readable without scripts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softprune.lab.report import render_comparison, render_run

Make = Callable[..., tuple[Path, dict[str, Any]]]

# Visible text that sticks out of the window to the right; what scrolls inside its own box may.
OVERFLOW = """
[...document.querySelectorAll('main *')]
  .filter((e) => !e.closest('.scroll') && !e.closest('.hidden') && e.getClientRects().length)
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 90))
"""


@pytest.fixture
def report(make_run: Make) -> tuple[Path, dict[str, Any]]:
    folder, record = make_run("run", "vgg16", epochs=20)
    return render_run(folder), record


@pytest.mark.parametrize(
    ("network", "width", "dark"), [("vgg16", 1280, False), ("resnet164", 390, True), ("digits_net", 760, False)]
)
def test_a_run_renders_without_errors_and_fits(
    chromium: Any, make_run: Make, tmp_path: Path, network: str, width: int, dark: bool
) -> None:
    page = render_run(make_run("run", network)[0])
    chromium.open(page, width=width, dark=dark)
    assert chromium.problems == []
    assert chromium.requests == [page.resolve().as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(OVERFLOW) == []
    picture = chromium.screenshot(tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000  # a blank page is a few kilobytes
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark


def test_curves_stretch_and_their_text_does_not(chromium: Any, report: tuple[Path, dict[str, Any]]) -> None:
    page, record = report
    sizes = "[...document.querySelectorAll('#epochs .plot')].map((e) => e.getBoundingClientRect().width)[0]"
    text = "document.querySelector('#epochs .plot text').getBoundingClientRect().height"
    found = []
    for width in (1280, 390):
        chromium.open(page, width=width)
        found.append((chromium.evaluate(sizes), chromium.evaluate(text)))
    assert found[0][0] > 2 * found[1][0]
    assert found[0][1] == found[1][1]
    read = "document.querySelector('#epochs .strip:nth-of-type(20) title').textContent"
    assert f"{record['epochs'][19]['test_top1']:.2f}%" in chromium.evaluate(read)


def test_tables_sort_by_any_column(chromium: Any, report: tuple[Path, dict[str, Any]]) -> None:
    page, record = report
    chromium.open(page)
    kept = "[...document.querySelectorAll('#widths tbody tr')].map((row) => Number(row.cells[3].dataset.value))"
    press = "[...document.querySelectorAll('#widths thead button')].find((b) => b.textContent === 'After').click()"
    before = [site["kept"] for site in record["sites"]]
    assert chromium.evaluate(kept) == before
    chromium.evaluate(press)
    assert chromium.evaluate(kept) == sorted(before, reverse=True)
    chromium.evaluate(press)
    assert chromium.evaluate(kept) == sorted(before)
    assert chromium.problems == []


def test_the_comparison_fits_a_phone(chromium: Any, make_run: Make, tmp_path: Path) -> None:
    folders = [make_run(f"{level}-{seed}", seed=seed, level=level)[0] for level in (0.7, 1.2) for seed in (0, 1)]
    folders += [make_run(f"deep-{level}", "resnet164", level=level)[0] for level in (0.7, 1.2)]
    page = render_comparison(folders, tmp_path / "comparison.html")
    chromium.open(page, width=390)
    assert chromium.problems == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 390
    assert chromium.evaluate(OVERFLOW) == []
    assert len(chromium.screenshot(tmp_path / "comparison.png").read_bytes()) > 50_000
