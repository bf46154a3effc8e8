"""When to stop early: SIGTERM, SIGINT (Ctrl-C) and a time limit all ask for a stop after the current step."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

EXIT_STOPPED = 75
"""The exit code of a process that stopped early with everything saved (sysexits' EX_TEMPFAIL: try again)."""


class StopSignal:
    """Holds the reason to stop, once there is one.

    As a context manager it takes over SIGTERM and SIGINT and gives them back on exit. A second SIGINT
    interrupts at once, for whoever does not want to wait for the step and the checkpoint.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._time_limit = time_limit
        self._signal: str | None = None
        self._previous: dict[int, Any] = {}

    def reason(self) -> str | None:
        """Why the run should stop now, in words, or None to go on."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"the time limit of {self._time_limit:g} s"
        return None

    def __enter__(self) -> "StopSignal":
        # Only the main thread may set handlers; a run inside another thread is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name
