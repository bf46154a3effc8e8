"""Progress events, the log file and stop requests of a run. Does not import PyTorch."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from types import FrameType
from typing import Any

from softprune.errors import SoftpruneError
from softprune.lab.runs.result import Epoch, Totals

EXIT_STOPPED = 75
"""Exit code of a process that stopped early with everything saved (sysexits' EX_TEMPFAIL: try again)."""

run_log = logging.getLogger("softprune.run")
"""Logs the progress of a run to its log file only; terminals show progress through a :class:`Listener`."""
run_log.propagate = False
run_log.setLevel(logging.INFO)


class Listener:
    """Receives the events of a run. The methods do nothing by default; override those you need."""

    def on_phase(self, text: str) -> None:
        """Called when a phase begins: the dense baseline, a cut, fine-tuning, the final measurements."""

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        """Called when epoch ``epoch`` (zero-based) of ``epochs`` begins, which has ``steps`` steps."""

    def on_step(self, done: int) -> None:
        """Called after each step; ``done`` steps of the epoch are finished."""

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        """Called after each epoch with its line of metrics.jsonl and the cost of the dense network."""


def begin_phase(text: str, listener: Listener) -> None:
    """Log the start of a phase and notify the listener."""
    run_log.info(text)
    listener.on_phase(text)


class StopSignal:
    """Requests a stop after the current step, on SIGTERM, SIGINT (Ctrl-C), SIGHUP or when a time limit is reached.

    As a context manager it installs signal handlers and restores the previous ones on exit. A second SIGINT raises
    KeyboardInterrupt. SIGHUP, sent when a terminal is closed, stays ignored under `nohup`.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._time_limit = time_limit
        self._signal: str | None = None
        self._previous: dict[int, Any] = {}

    def reason(self) -> str | None:
        """Return why the run must stop, or None if it can continue."""
        if self._signal is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return f"the time limit of {self._time_limit:g} s"
        return self._signal

    def __enter__(self) -> "StopSignal":
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not on Windows
                numbers.append(signal.SIGHUP)
            self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name


@contextmanager
def log_kept() -> Iterator[MemoryHandler]:
    """Buffer log records of the run and of softprune until :func:`open_log` opens the file; close it on exit.

    The loggers keep the level that the application has set.
    """
    handler, loggers = MemoryHandler(capacity=1, flushLevel=sys.maxsize), (run_log, logging.getLogger("softprune"))
    for each in loggers:
        each.addHandler(handler)
    try:
        yield handler
    except BaseException as error:
        kind = "an error" if isinstance(error, SoftpruneError) else type(error).__name__
        run_log.error("stopped by %s: %s", kind, error)
        raise
    finally:
        for each in loggers:
            each.removeHandler(handler)
        if handler.target is not None:
            handler.target.close()
        handler.close()


def open_log(handler: MemoryHandler, path: Path) -> None:
    """Append the buffered and all further log records to the file ``path``."""
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handler.setTarget(file)
    handler.flush()
