"""Output of the commands: tables that fit the terminal, plain lines in a pipe, JSON, and the progress of a run."""

import contextlib
import json
import logging
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from softprune.errors import printable
from softprune.lab.report.text import cut, fixed, percent
from softprune.lab.runs.result import Epoch, Totals
from softprune.lab.train.control import Listener
from softprune.log import is_rank_0

# emoji=False, or rich would replace ":ok:" in names such as module:ok:net.
_out = Console(emoji=False, highlight=False, soft_wrap=True)
_err = Console(stderr=True, emoji=False, highlight=False, soft_wrap=True)
_PIPE = 10_000
"""Width of a table in a pipe, where every row is one line."""


def say(text: str = "", *, wrap: bool = False) -> None:
    """Print one line to standard output. ``wrap`` breaks it between words at the width of the terminal."""
    _out.print(printable(text, "\n\t"), markup=False, soft_wrap=not (wrap and _out.is_terminal))


def remark(text: str) -> None:
    """Print one line to standard error, above a progress bar."""
    text = printable(text, "\n\t")
    # rich's progress bar redirects sys.stderr, but not the output of another rich console.
    print(textwrap.fill(text, _err.width) if _err.is_terminal else text, file=sys.stderr)


def error_line(text: str) -> None:
    """Print an error message to standard error."""
    _err.print("error: ", style="bold red", end="")
    _err.print(printable(text, "\n\t"), markup=False)


def print_json(facts: Any) -> None:
    """Print ``facts`` as JSON."""
    _out.out(json.dumps(facts, indent=1, default=str), highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> list[str]:
    """Print a table and return the names of the columns that did not fit.

    Columns of numbers are right-aligned, and columns of dashes only are not printed. If the table is too wide for the
    terminal, the columns in ``optional`` are left out one by one, in this order.
    """
    table = [[printable(cell, "\t") for cell in column] for column in zip(columns, *rows, strict=True)]
    table = [column for column in table if set(column[1:]) != {"-"}]
    out, left_out = _out if _out.is_terminal else Console(file=_out.file, width=_PIPE), list[str]()
    for name in optional:
        if Measurement.get(out, out.options.update(width=_PIPE), _grid(table)).minimum <= out.width:
            break
        left_out += [column[0] for column in table if column[0] == name]
        table = [column for column in table if column[0] != name]
    out.print(_grid(table), markup=False, highlight=False, emoji=False, soft_wrap=False)
    return left_out


def _grid(table: Sequence[Sequence[str]]) -> Table:
    """Return a table from columns, each a head followed by its cells."""
    grid = Table(box=box.SIMPLE_HEAD if _out.is_terminal else None, show_edge=False, padding=(0, 1, 0, 0))
    for head, *cells in table:
        right = bool(cells) and all(cell[:1] in "0123456789-+" for cell in cells)
        width = max(map(len, cells)) if right else None  # never wrap a number
        grid.add_column(head, justify="right" if right else "left", min_width=width, overflow="fold")
    for row in zip(*(column[1:] for column in table), strict=True):
        grid.add_row(*row)
    return grid


def print_facts(columns: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool) -> None:
    """Print a table, or the same cells as a JSON list of objects."""
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        with contextlib.suppress(OSError):  # the run continues if its terminal is closed
            remark(f"{prefix}{self.format(record)}")


def show_log(debug: bool) -> None:
    """Print the log of the library to standard error."""
    log = logging.getLogger("softprune")
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.handlers = [_LogLines()]
    log.propagate = False


class _Progress(Listener):
    """Prints a line per epoch; on a terminal, shows a progress bar and prints a line for the last epoch only."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("", visible=False, facts="", epoch="")
        self._epoch = self._epochs = self._steps = 0

    def on_phase(self, text: str) -> None:
        self._bar.reset(self._task, visible=False, facts="", epoch="")
        with contextlib.suppress(OSError):  # the run continues if its terminal is closed or its output disk is full
            say(text)

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self._epoch, self._epochs, self._steps = epoch, epochs, steps
        place, done = f"epoch {epoch + 1}/{epochs}", epoch * steps
        self._bar.update(self._task, epoch=place, total=epochs * steps, completed=done, visible=True)

    def on_step(self, done: int) -> None:
        self._bar.update(self._task, completed=self._epoch * self._steps + done)

    def on_epoch(self, row: Epoch, dense: Totals) -> None:
        facts = [f"loss {fixed(row.train_loss, 3)}"]
        if row.penalty is not None:
            facts.append(f"penalty {row.penalty:.3f}")
        if row.test_top1 is not None:
            facts.append(f"top-1 {percent(row.test_top1)}")
        if row.macs != dense.macs:
            facts.append(f"cut {percent(cut(dense.macs, row.macs))}")
        if not self._bar.disable and row.number < self._epochs:
            self._bar.update(self._task, facts="  ".join(facts))
        else:
            place = f"epoch {row.number}/{self._epochs}"
            self.on_phase("  ".join([place, *facts, f"{row.images_per_second:,.0f} img/s"]))


@contextlib.contextmanager
def run_progress() -> Iterator[Listener]:
    """Yield a listener that prints the progress of a run; other processes than rank 0 get a silent one."""
    if not is_rank_0():
        yield Listener()
        return
    texts = [TextColumn(f"{{task.fields[{name}]}}") for name in ("epoch", "facts")]
    columns = texts[0], BarColumn(bar_width=16), texts[1], TimeRemainingColumn(compact=True)
    with Progress(*columns, console=_out, transient=True, disable=not _out.is_terminal) as bar:
        yield _Progress(bar)
