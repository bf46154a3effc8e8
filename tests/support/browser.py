"""A headless Chromium over its debugging pipe: the real thing, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage"
)

# Chromium reads commands from descriptor 3 and writes answers to 4; this moves ours there, then becomes it.
LAUNCH = """
import fcntl, os, sys
r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(r, 3)
os.dup2(w, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The path of an installed Chromium, or ``None``; SOFTPRUNE_CHROMIUM names another one."""
    named = os.environ.get("SOFTPRUNE_CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One Chromium with one page. ``problems`` collects console errors, exceptions and blocked content."""

    def __init__(self, executable: str, profile: Path) -> None:
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        flags = f"{FLAGS} --user-data-dir={profile} --remote-debugging-pipe about:blank".split()
        self._log = (profile.parent / f"{profile.name}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(child_in), str(child_out), executable, *flags],
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(child_in)
        os.close(child_out)
        self._buffer = b""
        self._number = 0
        self._events: deque[dict[str, Any]] = deque()
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(
        self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        self.problems.clear()
        self.requests.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme, media="")
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        answer = self.call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in answer, f"{path}: {answer['errorText']}"
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, also on a page whose own scripts are off."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> Path:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
        finally:
            os.close(self._to)
            os.close(self._from)
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._log.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _until(self, event: str) -> None:
        while not any(seen.get("method") == event for seen in self._events):
            self._receive()

    def _receive(self) -> dict[str, Any]:
        limit = time.monotonic() + 60
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(limit - time.monotonic(), 0))
            chunk = os.read(self._from, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(f"Chromium gave no answer; its log is {self._log.name}.")
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "id" not in message:
            self._events.append(message)
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event["method"], event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.problems.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


if __name__ == "__main__":  # browser.py PAGE PICTURE [WIDTH] [dark] [noscript]: look at a page
    import tempfile

    found = find_chromium()
    assert found, "no Chromium on PATH"
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(found, Path(folder) / "profile")
        width = next((int(word) for word in sys.argv[3:] if word.isdigit()), 1280)
        browser.open(Path(sys.argv[1]), width, 900, "dark" in sys.argv, "noscript" not in sys.argv)
        print(browser.screenshot(Path(sys.argv[2])), browser.problems)
        browser.close()
