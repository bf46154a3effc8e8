"""Between a run and whoever started it: progress events, the log file, and requests to stop. Imports no torch."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from types import FrameType
from typing import Any

from softprune.errors import SoftpruneError
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Epoch, Totals

EXIT_STOPPED = 75
"""Exit code of a process that stopped early with everything saved (sysexits' EX_TEMPFAIL: try again)."""


class Listener:
    """Receives a run's events. Every method does nothing; override the ones you need."""

    def on_phase(self, text: str) -> None:
        """A new phase begins: the dense baseline, a cut, fine-tuning, measuring."""

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        """Epoch ``epoch`` (zero-based) of ``epochs`` begins; it has ``steps`` steps."""

    def on_step(self, done: int) -> None:
        """``done`` steps of the epoch are finished."""

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        """An epoch ended: its line of metrics.jsonl, and the cost of the dense network."""


class StopSignal:
    """Holds the reason to stop after the current step: SIGTERM, SIGINT (Ctrl-C), SIGHUP or a time limit.

    As a context manager it handles the signals and restores the previous handlers on exit. A second SIGINT interrupts
    at once. SIGHUP, which a closed terminal sends, stays ignored where `nohup` ignores it.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._time_limit = time_limit
        self._signal: str | None = None
        self._previous: dict[int, Any] = {}

    def reason(self) -> str | None:
        """Return why the run should stop now, or None."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"the time limit of {self._time_limit:g} s"
        return None

    def __enter__(self) -> "StopSignal":
        # Only the main thread may set handlers; a run inside another thread is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not on Windows
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name


@contextmanager
def early_messages() -> Iterator[list[logging.LogRecord]]:
    """Collect softprune's messages until the block passes them to :func:`run_log`: the run has no folder yet."""
    package, handler = logging.getLogger("softprune"), BufferingHandler(sys.maxsize)
    package.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        package.removeHandler(handler)


@contextmanager
def run_log(
    folder: RunFolder, listener: Listener, *, write: bool = True, early: Sequence[logging.LogRecord] = ()
) -> Iterator[Listener]:
    """Append what happens within the block to run.log. Yield a listener that passes events on to ``listener``.

    Messages of softprune's loggers are included at the level that the application has set for them; ``early`` ones are
    written first.
    """
    if not write:
        yield listener
        return
    handler = logging.FileHandler(folder.log, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for record in tuple(early):
        handler.handle(record)
    package = logging.getLogger("softprune")
    package.addHandler(handler)
    try:
        yield _LoggedListener(listener, handler)
    except BaseException as error:
        kind = "an error" if isinstance(error, SoftpruneError) else type(error).__name__
        _write(handler, f"stopped by {kind}: {error}", logging.ERROR)
        raise
    finally:
        package.removeHandler(handler)
        handler.close()


class _LoggedListener(Listener):
    def __init__(self, listener: Listener, handler: logging.Handler) -> None:
        self._listener, self._handler = listener, handler

    def on_phase(self, text: str) -> None:
        _write(self._handler, text)
        self._listener.on_phase(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self._listener.on_epoch_start(epoch, epochs, steps)

    def on_step(self, done: int) -> None:
        self._listener.on_step(done)

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        facts = [f"epoch {row.number}", f"lr {row.lr:.4g}"]
        figures = (("loss", row.train_loss), ("top-1", row.test_top1))
        facts += [f"{title} {value:,.4g}" for title, value in figures if value is not None]
        _write(self._handler, ", ".join([*facts, f"MACs {row.macs:,}", f"{row.seconds:.1f} s"]))
        self._listener.on_epoch(row, dense)


def _write(handler: logging.Handler, message: str, level: int = logging.INFO) -> None:
    handler.handle(logging.LogRecord("softprune.run", level, __file__, 0, message, None, None))
