"""What commands print: tables that fit the terminal, plain lines in a pipe, JSON on request.

Output may become unwritable while a command runs (a closed pipe, a full disk). A training run then continues without
it; any other command fails.
"""

import contextlib
import errno
import io
import json
import logging
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Literal, TextIO, cast

from rich import box
from rich.console import Console
from rich.table import Table

from softprune.errors import printable


class _Stream(io.TextIOBase):
    """Writes to ``sys.stdout`` or ``sys.stderr``, and drops the text after the first failure."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self.lost: OSError | None = None
        """The error after which nothing is written."""

    @property
    def _file(self) -> TextIO | None:
        file = getattr(sys, self._name)  # None where the shell has closed it (`>&-`)
        return cast(TextIO | None, getattr(file, "rich_proxied_file", file))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("fileno")
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Write ``text``, with escapes for characters that the encoding does not have."""
        if self._file is not None and self.lost is None:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                self._file.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self._file is not None and self.lost is None:
            try:
                self._file.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = error
        # Python flushes the buffer when it exits, which would fail again.
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
        if self is _stdout and _State.training:
            remark(f"warning: cannot write to standard output ({error.strerror}); the run continues without it")


class _State:
    training = False
    """Whether a run is in progress, which continues without its output."""
    live = False
    """Whether a bar or a live table occupies the last lines of the terminal."""


_stdout = _Stream("stdout")
_stderr = _Stream("stderr")
# Names such as module:ok:net must stay as they are, hence no emoji.
_out = Console(file=cast(IO[str], _stdout), emoji=False, highlight=False, soft_wrap=True)
_err = Console(file=cast(IO[str], _stderr), emoji=False, highlight=False, soft_wrap=True)


def begin_output() -> None:
    """Reset the state of the streams at the start of a command."""
    _stdout.lost = _stderr.lost = None
    _State.training = _State.live = False


def may_lose_output() -> None:
    """From here on lost output gives a warning, and the command continues."""
    _State.training = True


@contextlib.contextmanager
def live_output() -> Iterator[Console]:
    """Within this context remarks and log lines are printed above a live display on the returned console."""
    _State.live = True
    try:
        yield _out
    finally:
        _State.live = False


def lost_output() -> str | None:
    """Return the error of a command that could not print its result. A closed pipe (of `head`) is no error."""
    error = _stdout.lost
    if error is None or _State.training or error.errno == errno.EPIPE:
        return None
    return f"Standard output must be writable. Got {error.strerror or error}. Redirect it to another file."


def console() -> Console:
    """Return the console of standard output."""
    return _out


def say(text: str = "", *, wrap: bool = False) -> None:
    """Print one line. With ``wrap`` it is broken between words where the terminal ends."""
    _out.print(printable(text, "\n\t"), markup=False, soft_wrap=not (wrap and _out.is_terminal))


def remark(text: str) -> None:
    """Print one line to standard error."""
    # A second stream would overwrite the lines of a live display in the same terminal.
    target = _out if _State.live and _err.is_terminal else _err
    target.print(printable(text, "\n\t"), markup=False, soft_wrap=not target.is_terminal)


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

    Columns in which every cell starts with a digit, a sign or a dash are aligned to the right. In a terminal the heads
    and the text wrap so that the table fits. If it is still too wide, columns of ``optional`` are left out, the first
    ones first; without them each row becomes a list of its cells. In a pipe every row is one line with all columns.
    Columns of dashes alone are not printed.
    """
    table = [_Column(name, [printable(row[i], "\n\t") for row in rows]) for i, name in enumerate(columns)]
    table = [column for column in table if set(column.cells) != {"-"}]
    if not _out.is_terminal:
        _print_lines(title, table)
        return []
    left_out: list[str] = []
    for name in optional:
        if _least_width(table) <= _out.width:
            break
        if any(column.name == name for column in table):
            left_out.append(name)
            table = [column for column in table if column.name != name]
    if _least_width(table) > _out.width:
        _print_records(title, table)
        return left_out
    wrap_heads = sum(max(len(column.name), column.least) + 2 for column in table) - 2 > _out.width
    grid = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in table:
        right, width = column.is_numeric, max(column.least, 0 if wrap_heads else len(column.name))
        head = "\n".join(textwrap.wrap(column.name, width)) if right else column.name
        grid.add_column(head, justify="right" if right else "left", min_width=width, no_wrap=right, overflow="fold")
    for row in _rows(table):
        grid.add_row(*row)
    _out.print(grid, markup=False, soft_wrap=False)
    return left_out


_LONG_WORD = 32


class _Column:
    def __init__(self, name: str, cells: list[str]) -> None:
        self.name, self.cells = name, cells
        self.is_numeric = bool(cells) and all(cell[:1] in "0123456789-+" for cell in cells)
        words = [word for text in (name, *cells) for word in text.split()]
        least = max(map(len, [*name.split(), *cells] if self.is_numeric else words), default=0)
        self.least = least if self.is_numeric else min(least, _LONG_WORD)
        """The width without which a number or a word would be broken. Long paths may be."""


def _least_width(table: list[_Column]) -> int:
    return sum(column.least + 2 for column in table) - 2


def _rows(table: list[_Column]) -> Iterable[tuple[str, ...]]:
    return zip(*(column.cells for column in table), strict=True)


def _print_records(title: str, table: list[_Column]) -> None:
    if title:
        say(title)
    width = max(len(column.name) for column in table)
    for row in _rows(table):
        say()
        for column, cell in zip(table, row, strict=True):
            if cell:
                say(f"{column.name.ljust(width)}  {cell}")


def _print_lines(title: str, table: list[_Column]) -> None:
    if title:
        say(title)
    padded = []
    for column in table:
        texts = [column.name, *column.cells]
        width = max(map(len, texts))
        padded.append([text.rjust(width) if column.is_numeric else text.ljust(width) for text in texts])
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
        remark(f"{prefix}{self.format(record)}")


def show_log(debug: bool) -> None:
    """Send the log of the library to standard error."""
    log = logging.getLogger("softprune")
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.handlers = [_LogLines()]
    log.propagate = False
