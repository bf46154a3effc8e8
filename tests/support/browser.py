"""Headless Chromium, driven by Selenium, for the tests of the report pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

HEIGHT = 900


def find_browser() -> tuple[str, str] | None:
    """Chromium and its driver, from SOFTPRUNE_CHROMIUM and SOFTPRUNE_CHROMEDRIVER or from PATH."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = os.environ.get("SOFTPRUNE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    driver = os.environ.get("SOFTPRUNE_CHROMEDRIVER") or shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One browser for many pages. `problems` holds errors of the console since the page was opened."""

    def __init__(self, browser: str, driver: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # An explicit service, so that Selenium downloads nothing.
        self.driver = webdriver.Chrome(options, Service(driver))

    def open(self, page: Path, *, width: int = 1280, dark: bool = False) -> None:
        self.driver.get("about:blank")
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", features=[scheme])
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # forget what earlier pages logged
        address = page.resolve().as_uri()
        self.driver.get(address)
        # On a busy machine the first expressions can still meet the blank page.
        ready = f"document.readyState == 'complete' && location.href == {json.dumps(address)}"
        WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: self.evaluate(ready))

    @property
    def problems(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self._cdp("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """The whole page as a PNG file."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        area = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        picture = self._cdp("Page.captureScreenshot", captureBeyondViewport=True, clip=area)
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def close(self) -> None:
        self.driver.quit()

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)
