"""What commands print: tables that fit the terminal, plain lines in a pipe, JSON on request."""

import contextlib
import json
import logging
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from softprune.errors import printable

# Names such as module:ok:net must stay as they are, hence no emoji.
_out = Console(emoji=False, highlight=False, soft_wrap=True)
_err = Console(stderr=True, emoji=False, highlight=False, soft_wrap=True)


def console() -> Console:
    """Return the console of standard output."""
    return _out


def say(text: str = "", *, wrap: bool = False) -> None:
    """Print one line. With ``wrap`` it is broken between words where the terminal ends."""
    _out.print(printable(text, "\n\t"), markup=False, soft_wrap=not (wrap and _out.is_terminal))


def remark(text: str) -> None:
    """Print one line to standard error, above a progress bar."""
    text = printable(text, "\n\t")
    # rich's bar catches what is written to sys.stderr, but not what another console prints.
    print(textwrap.fill(text, _err.width) if _err.is_terminal else text, file=sys.stderr)


def error_line(text: str) -> None:
    """Print an error message to standard error."""
    _err.print("error: ", style="bold red", end="")
    _err.print(printable(text, "\n\t"), markup=False)


def print_json(facts: Any) -> None:
    """Print ``facts`` as JSON."""
    _out.out(json.dumps(facts, indent=1, default=str), highlight=False)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()
) -> list[str]:
    """Print a table and return the columns that were left out.

    Columns in which every cell starts with a digit, a sign or a dash are aligned to the right; those of dashes alone
    are not printed. If it is too wide for the terminal, columns of ``optional`` are left out, the first ones first.
    In a pipe every row is one line with all columns.
    """
    table = [[printable(cell, "\t") for cell in column] for column in zip(columns, *rows, strict=True)]
    table = [column for column in table if set(column[1:]) != {"-"}]
    if not _out.is_terminal:
        _print_lines(title, table)
        return []
    left_out: list[str] = []
    for name in optional:
        if Measurement.get(_out, _out.options.update(width=10_000), _grid(title, table)).minimum <= _out.width:
            break
        if any(column[0] == name for column in table):
            left_out.append(name)
            table = [column for column in table if column[0] != name]
    _out.print(_grid(title, table), markup=False, soft_wrap=False)
    return left_out


def _is_numeric(column: Sequence[str]) -> bool:
    return len(column) > 1 and all(cell[:1] in "0123456789-+" for cell in column[1:])


def _grid(title: str, table: Sequence[Sequence[str]]) -> Table:
    grid = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in table:
        right = _is_numeric(column)
        width = max(map(len, column[1:]), default=0) if right else None  # a number is never broken
        grid.add_column(column[0], justify="right" if right else "left", min_width=width, overflow="fold")
    for row in zip(*(column[1:] for column in table), strict=True):
        grid.add_row(*row)
    return grid


def _print_lines(title: str, table: Sequence[Sequence[str]]) -> None:
    if title:
        say(title)
    padded = []
    for column in table:
        width = max(map(len, column))
        padded.append([cell.rjust(width) if _is_numeric(column) else cell.ljust(width) for cell in column])
    for row in zip(*padded, strict=True):
        say("  ".join(row).rstrip())


def print_facts(columns: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool) -> None:
    """Print a table of text, or the same cells as a JSON list of objects."""
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table("", columns, rows)


def format_count(number: float) -> str:
    """Format a count: 1,234 or 12.3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def format_percent(value: float | None, digits: int = 2) -> str:
    """Format a percentage; an unknown one is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def format_cut(before: float | None, after: float | None) -> str:
    """Format the share of ``before`` that was removed, in percent."""
    return format_percent(100 * (1 - after / before), 1) if before and after is not None else "-"


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        with contextlib.suppress(OSError):  # a run outlives its terminal
            remark(f"{prefix}{self.format(record)}")


def show_log(debug: bool) -> None:
    """Send the log of the library to standard error."""
    log = logging.getLogger("softprune")
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.handlers = [_LogLines()]
    log.propagate = False
