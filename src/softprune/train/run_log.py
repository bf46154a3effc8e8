"""The log file of a run: its stages, epochs, warnings and errors, with times."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from softprune.errors import SoftpruneError
from softprune.runs.folder import RunFolder
from softprune.runs.result import Epoch, Totals
from softprune.train.control import Listener


@contextmanager
def run_log(folder: RunFolder, listener: Listener, *, write: bool = True) -> Iterator[Listener]:
    """Append what happens within the block to run.log. Yield a listener that passes events on to ``listener``.

    Messages of softprune's loggers are included at the level that the application has set for them.
    """
    if not write:
        yield listener
        return
    handler = logging.FileHandler(folder.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))
    package = logging.getLogger("softprune")
    package.addHandler(handler)
    try:
        yield _LoggedListener(listener, handler)
    except SoftpruneError as error:
        _write(handler, f"stopped by an error: {error}", logging.ERROR)
        raise
    except BaseException as error:
        _write(handler, f"stopped by {type(error).__name__}: {error}", logging.ERROR)
        raise
    finally:
        package.removeHandler(handler)
        handler.close()


class _LoggedListener(Listener):
    def __init__(self, listener: Listener, handler: logging.Handler) -> None:
        self._listener, self._handler = listener, handler

    def on_stage(self, text: str) -> None:
        _write(self._handler, text)
        self._listener.on_stage(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self._listener.on_epoch_start(epoch, epochs, steps)

    def on_step(self, done: int) -> None:
        self._listener.on_step(done)

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        facts = [f"epoch {row.number}", f"lr {row.lr:.4g}"]
        for title, value in (("loss", row.train_loss), ("top-1", row.test_top1)):
            if value is not None:
                facts.append(f"{title} {value:,.4g}")
        _write(self._handler, ", ".join([*facts, f"MACs {row.macs:,}", f"{row.seconds:.1f} s"]))
        self._listener.on_epoch(row, dense)


def _write(handler: logging.Handler, message: str, level: int = logging.INFO) -> None:
    handler.handle(logging.LogRecord("softprune.run", level, __file__, 0, message, None, None))
