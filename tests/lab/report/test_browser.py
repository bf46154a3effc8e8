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
# Tables that are wider than their box, on a page whose folded parts are open.
SCROLLING = """
(() => { for (const part of document.querySelectorAll('details')) part.open = true;
  return [...document.querySelectorAll('.scroll')].filter((e) => e.getClientRects().length)
    .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.getAttribute('aria-label')); })()
"""
# Text of a chart that leaves the drawing.
CUT_OFF = """
[...document.querySelectorAll('.chart svg text, svg.chart text')].filter((e) => e.getClientRects().length)
  .filter((e) => { const box = e.getBoundingClientRect(), svg = e.closest('svg').getBoundingClientRect();
    return box.left < svg.left - 1 || box.right > svg.right + 1; }).map((e) => e.textContent)
"""
CENTRE = """
(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();
  return [box.left + box.width * {across}, box.top + box.height * {down}]; }})()
"""


def point_at(chromium: Any, selector: str, across: float = 0.5, down: float = 0.5) -> None:
    chromium.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    chromium.point_at(*chromium.evaluate(CENTRE.format(selector=selector, across=across, down=down)))


@pytest.fixture
def report(make_run: Make) -> tuple[Path, dict[str, Any]]:
    folder, record = make_run("run", "vgg16", epochs=20)
    return render_run(folder), record


@pytest.mark.parametrize(
    ("network", "width", "dark"),
    [
        ("vgg16", 1280, False),
        ("vgg16", 390, True),
        ("resnet164", 1280, True),
        ("resnet164", 390, False),
        ("digits_net", 390, False),
        ("digits_net", 760, False),
    ],
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
    assert chromium.evaluate(CUT_OFF) == []
    assert chromium.evaluate(SCROLLING) == []
    picture = chromium.screenshot(tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000  # a blank page is a few kilobytes
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark


def test_without_scripts_the_page_is_complete(chromium: Any, report: tuple[Path, dict[str, Any]]) -> None:
    page, record = report
    chromium.open(page, scripts=False)
    assert chromium.problems == []
    text = chromium.evaluate("document.body.innerText")
    for site in record["sites"]:
        assert site["name"] in text
    for title in ("Accuracy and pruning", "Where the MACs went"):
        assert title in text
    assert f"{record['table'][2]['macs']:,}" in text
    # The switch of the headline is plain HTML.
    views = "document.querySelector('.views').innerText"
    best = f"epoch {record['best']['epoch'] + 1}, chosen by test accuracy"
    assert best not in chromium.evaluate(views)
    chromium.evaluate("document.querySelector('#view-best').checked = true")
    assert best in chromium.evaluate(views)


def test_pointing_at_the_curves_reads_an_epoch(chromium: Any, report: tuple[Path, dict[str, Any]]) -> None:
    page, record = report
    chromium.open(page)
    point_at(chromium, "#epochs .wide .grid:nth-of-type(3)", 0.5, 0.3)
    said = chromium.evaluate("document.querySelector('#epochs .readout').innerText")
    epoch = int(said.split()[1]) - 1
    assert f"{record['epochs'][epoch]['test_top1']:.2f}" in said
    removed = 100 * (1 - record["epochs"][epoch]["macs"] / record["dense"]["macs"])
    assert f"{removed:.2f}" in said
    assert chromium.evaluate("document.querySelectorAll('#epochs .wide .cursor circle').length") == 5
    end = "new KeyboardEvent('keydown', {key: 'End'})"
    chromium.evaluate(f"document.querySelector('#epochs .wide svg').dispatchEvent({end})")
    assert "epoch 20" in chromium.evaluate("document.querySelector('#epochs .readout').innerText")
    assert chromium.problems == []


def test_tables_sort_by_any_column(chromium: Any, report: tuple[Path, dict[str, Any]]) -> None:
    page, record = report
    chromium.open(page)
    kept = "[...document.querySelectorAll('#widths tbody tr')].map((row) => Number(row.cells[2].dataset.value))"
    press = "[...document.querySelectorAll('#widths thead button')].find((b) => b.textContent === 'Kept').click()"
    before = [site["kept"] for site in record["sites"]]
    assert chromium.evaluate(kept) == before
    chromium.evaluate(press)
    assert chromium.evaluate(kept) == sorted(before, reverse=True)
    chromium.evaluate(press)
    assert chromium.evaluate(kept) == sorted(before)
    chromium.evaluate("document.querySelector('#widths thead button').click()")
    assert chromium.evaluate(kept) == before[::-1]  # by place in the network, last first
    assert chromium.problems == []


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_the_comparison_renders_and_hides_runs(chromium: Any, make_run: Make, tmp_path: Path, width: int) -> None:
    folders = [make_run(f"{level}-{seed}", seed=seed, level=level)[0] for level in (0.7, 1.2) for seed in (0, 1)]
    folders += [make_run(f"deep-{level}", "resnet164", level=level)[0] for level in (0.7, 1.2)]
    page = render_comparison(folders, tmp_path / "comparison.html")
    chromium.open(page, width=width)
    assert chromium.problems == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(OVERFLOW) == []
    assert chromium.evaluate(CUT_OFF) == []
    assert len(chromium.screenshot(tmp_path / "comparison.png").read_bytes()) > 50_000
    muted = "document.querySelectorAll('#epochs .line.muted-series').length"
    assert chromium.evaluate(muted) == 0
    chromium.evaluate("document.querySelector('#epochs .legend button').click()")
    assert chromium.evaluate(muted) == 2 * 2 * 3  # two drawings, two panels, two runs and their mean
    label = chromium.evaluate("document.querySelector('#epochs .legend button').innerText.split(',')[0]")
    assert label not in chromium.evaluate("document.querySelector('#epochs .readout').innerText")
    assert chromium.problems == []


def test_hostile_names_stay_text_in_a_browser(chromium: Any, make_run: Make) -> None:
    folder, record = make_run()
    name = "</script><script>document.title = 'owned'</script><svg onload=\"document.title='owned'\">"
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text.replace(record["name"], name.replace('"', '\\"')))
    chromium.open(render_run(folder))
    assert chromium.evaluate("document.title") == f"{name}: softprune report"
    assert name in chromium.evaluate("document.querySelector('.kicker').textContent")
    assert chromium.problems == []
