"""Run folders to report on, and a browser to look at the reports with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser as browsing
import pytest
import synthetic_runs as synthetic

NO_BROWSER = (
    "the reports were not opened in a browser: no Chromium with chromedriver on PATH (Debian: apt-get install "
    "chromium-driver; or set SOFTPRUNE_CHROMIUM and SOFTPRUNE_CHROMEDRIVER)"
)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Writes a run folder as `softprune train` does; gives the folder and the record in it."""

    def make(name: str = "run", network: str = "digits_net", **options: Any) -> tuple[Path, dict[str, Any]]:
        options.setdefault("epochs", 12)
        return tmp_path / name, synthetic.make(tmp_path / name, network, **options)

    return make


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One headless Chromium for all browser tests. Without one they are skipped, and the summary says so."""
    found = browsing.find_browser()
    if found is None:
        pytest.skip(NO_BROWSER)
    browser = browsing.Browser(*found)
    yield browser
    browser.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A missing browser must not look like a passing test."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.section("reports")
        terminalreporter.write_line(f"{len(skipped)} tests skipped: {NO_BROWSER}")
