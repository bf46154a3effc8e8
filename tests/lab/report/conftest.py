"""A browser to look at the reports with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import browser as browsing
import pytest

NO_BROWSER = (
    "the reports were not opened in a browser: no Chromium with chromedriver on PATH (Debian: apt-get install "
    "chromium-driver; or set SOFTPRUNE_CHROMIUM and SOFTPRUNE_CHROMEDRIVER)"
)


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
