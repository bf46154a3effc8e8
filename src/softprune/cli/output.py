"""What the commands print: tables and a progress bar in a terminal, plain lines elsewhere."""

import logging
import os
from collections.abc import Sequence
from typing import IO, Any, cast

from rich import box
from rich.console import Console
from rich.table import Table

from softprune.cli.streams import Stream, nobody_reads


class _Care:
    runs = False
    """Whether a run is under way, which goes on without its output."""


def _on_loss(error: OSError) -> None:
    if _Care.runs:
        remark(f"warning: standard output cannot be written ({error.strerror}); the run goes on without it")


_stdout = Stream("stdout", _on_loss)
_stderr = Stream("stderr", lambda error: None)
_out = Console(file=cast(IO[str], _stdout), highlight=False, soft_wrap=True)
_err = Console(file=cast(IO[str], _stderr), highlight=False, soft_wrap=True)


def begin_output() -> None:
    """A command begins: nothing is lost yet, and its output is what it is called for."""
    _stdout.lost = _stderr.lost = None
    _Care.runs = False


def run_begins() -> None:
    """From here on a run is under way: if its output cannot be written, a line says so at once and it goes on."""
    _Care.runs = True


def lost_output() -> str | None:
    """Why a command has failed to print what it was called for. A reader that has seen enough is no failure."""
    error = _stdout.lost
    return None if error is None or _Care.runs or nobody_reads(error) else error.strerror or str(error)


def console() -> Console:
    """Where results go."""
    return _out


def say(text: str = "") -> None:
    """One line of ordinary output."""
    _out.print(text, markup=False)


def remark(text: str) -> None:
    """One line on standard error about what is printed: what was left out of it, and why."""
    _err.print(text, markup=False)


def error_line(text: str) -> None:
    """The message of an error, on standard error."""
    _err.print("error: ", style="bold red", end="")
    _err.print(text, markup=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns whose every cell begins with a digit, sign or dash are aligned to the right."""
    numeric = [all(row[i][:1] in "0123456789-+" for row in rows) and bool(rows) for i in range(len(columns))]
    widths = [
        max(len(name), *(len(row[i]) for row in rows)) if rows else len(name)
        for i, name in enumerate(columns)
    ]
    # Folded into columns of two letters a table is harder to read than with long lines.
    if _out.is_terminal and sum(widths) + 2 * len(widths) <= _out.width:
        table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, right in zip(columns, numeric, strict=True):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        _out.print(table, markup=False)
        return
    if title:
        say(title)
    for row in [columns, *rows]:
        cells = zip(row, widths, numeric, strict=True)
        say(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells
            ).rstrip()
        )


def count(number: float | None) -> str:
    """A count in a form that is quick to read: 1,234 or 12.3 M."""
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def percent(value: float | None, digits: int = 2) -> str:
    """A percentage, or a dash for one that is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def cut(before: float | None, after: float | None) -> str:
    """How much of ``before`` is gone, in percent."""
    return percent(100 * (1 - after / before), 1) if before and after is not None else "-"


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        _err.print(f"{prefix}{self.format(record)}", markup=False)


def show_log(debug: bool) -> None:
    """Send what the library logs to standard error."""
    log: Any = logging.getLogger("softprune")
    log.setLevel(logging.DEBUG if debug else logging.INFO if speaks() else logging.ERROR)
    log.handlers = [_Lines()]
    log.propagate = False


def speaks() -> bool:
    """Whether this process is the only one, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
