"""Between a run and whoever started it: progress events, the log file, and requests to stop. Imports no torch."""

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


class RunLog(Listener):
    """Writes a run's events to its log file, and passes them on to another listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        # Keeps what comes before the run has a folder.
        self.handler = MemoryHandler(capacity=1, flushLevel=sys.maxsize)

    def open(self, path: Path) -> None:
        """Append to the file ``path``, first what was logged until now."""
        file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self.handler.setTarget(file)
        self.handler.flush()

    def write(self, message: str, level: int = logging.INFO) -> None:
        self.handler.handle(logging.LogRecord("softprune.run", level, __file__, 0, message, None, None))

    def on_phase(self, text: str) -> None:
        self.write(text)
        self._listener.on_phase(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self._listener.on_epoch_start(epoch, epochs, steps)

    def on_step(self, done: int) -> None:
        self._listener.on_step(done)

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        facts = [f"epoch {row.number}", f"lr {row.lr:.4g}"]
        numbers = (("loss", row.train_loss), ("top-1", row.test_top1))
        facts += [f"{title} {value:,.4g}" for title, value in numbers if value is not None]
        self.write(", ".join([*facts, f"MACs {row.macs:,}", f"{row.seconds:.1f} s"]))
        self._listener.on_epoch(row, dense)


@contextmanager
def run_log(listener: Listener | None) -> Iterator[RunLog]:
    """Yield a listener that passes events on to ``listener``, and logs them once its file is open.

    Messages of softprune's loggers are included at the level that the application has set for them.
    """
    log, package = RunLog(listener or Listener()), logging.getLogger("softprune")
    package.addHandler(log.handler)
    try:
        yield log
    except BaseException as error:
        kind = "an error" if isinstance(error, SoftpruneError) else type(error).__name__
        log.write(f"stopped by {kind}: {error}", logging.ERROR)
        raise
    finally:
        package.removeHandler(log.handler)
        if log.handler.target is not None:
            log.handler.target.close()
        log.handler.close()
