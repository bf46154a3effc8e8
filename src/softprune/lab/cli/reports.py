"""`report` and `compare`: pages and tables from the records of runs."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softprune.errors import ConfigError, printable
from softprune.io import write_atomically
from softprune.lab.cli.app import Json, Run, command
from softprune.lab.cli.output import format_count, format_cut, format_percent, print_json, print_table, remark, say
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.reading import read_metrics
from softprune.lab.runs.result import Result

if TYPE_CHECKING:
    from softprune.lab.report import PaperRow

_IMPLAUSIBLE = 1.5
"""Above this multiple of the MAC reduction a speed-up is reported with a remark, as it is below 1."""
Columns = dict[str, tuple[str, ...]]
"""The cells of a table by the head of their column."""


def print_result(result: Result) -> None:
    """Print the table of dense, masked and compact network, and the speed-up."""
    from softprune.lab.report.text import THIN, file_size

    dense = result.dense
    rows = [
        [
            row.name,
            _with_sign(format_percent(row.top1)),
            _with_sign(format_percent(row.top5)),
            format_count(row.params),
            _with_sign(format_cut(dense.params, row.params)),
            format_count(row.macs),
            _with_sign(format_cut(dense.macs, row.macs)),
            "-" if row.file_bytes is None else file_size(row.file_bytes).replace(THIN, " "),
            "-" if row.latency_ms is None else f"{row.latency_ms:.2f} ms",
        ]
        for row in result.table
    ]
    columns = ["", "top-1", "top-5", "params", "cut", "MACs", "cut", "file", "latency"]
    say()
    print_table(f"{result.model} on {result.data}, {result.method}", columns, rows)
    if result.speed_up is not None:
        say()
        say(f"Speed-up: {result.speed_up:.2f}x (latency of {result.latency_batch} images)")
        explained = dense.macs / max(result.compact.macs, 1)
        if explained > 1 and not 1 <= result.speed_up <= _IMPLAUSIBLE * explained:
            say(
                f"The MACs suggest up to {explained:.1f}x. `softprune bench` measures again, with other backends, "
                "batch sizes and widths (`--round-to 8`), and says what to try. Other programs on this machine disturb "
                "the measurement.",
                wrap=True,
            )


def _with_sign(number: str) -> str:
    return number if number == "-" else f"{number}%"


def write_report(run: Path, out: Path | None = None, refresh: int = 0) -> Path:
    """Write the page of a run, to RUN/report.html or ``out``, and return its path.

    With ``refresh``, an open page reloads after these seconds.
    """
    from softprune.lab.report import render_run

    return render_run(run, out, refresh=refresh)


WATCH_SECONDS = 2.0


@command
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. [default: RUN/report.html]")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update the report whenever the run has new records.")] = False,
) -> None:
    """Write the report of a run, as one page.

    The run need not be finished.
    """
    if watch:
        _watch(run, out)
    else:
        say(f"Report: {write_report(run, out)}")


def _watch(run: Path, out: Path | None) -> None:
    """Write the page at each change of the records until the run has finished; the open page reloads itself."""
    if not run.is_dir():
        raise ConfigError(f"A run to watch must be a folder. Got {run}, which does not exist.")
    say("Watching. Open the page in a browser; it reloads itself. Ctrl-C ends.")
    seen: list[tuple[int, int]] = []
    while True:
        state = [
            (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)
            for folder in (run, run / "dense")
            for file in (folder / "result.json", folder / "metrics.jsonl")
        ]
        finished, trained = (bool(size) for _, size in state[:2])
        # The first line may be half written.
        if state != seen and (finished or (trained and read_metrics(run / "metrics.jsonl")[0])):
            page = write_report(run, out, refresh=0 if finished else 10)
            if finished or not seen:
                say(f"Report: {page}")
            if finished:
                return
            seen = state
        time.sleep(WATCH_SECONDS)


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or of sweeps.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write a page (comparison.html) or a table (comparison.md).")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the table as CSV in full precision.")] = None,
    paper: Annotated[
        bool, typer.Option("--paper-tables", help="Print tables 1 to 8 of the paper with our figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare finished runs in a table.

    The table has the accuracy of the last and the best epoch, the drop from the dense network, the reduction of
    channels, parameters and MACs, and the figures of the paper where it has them. Runs that differ only in their seed
    are averaged. The dense network is that of the run itself (train.dense_baseline), or the mean of the dense runs of
    the same training (network, data, epochs, optimizer, schedule) among those compared. Unfinished runs, and runs
    with the configuration and seed of a newer one, are left out and named.
    """
    from softprune.lab.report import csv_text, markdown, paper_tables, paper_tables_markdown, render_comparison

    folders = _finished(runs)
    rows = comparison_rows(folders)
    if paper:
        tables = paper_tables(rows)
        if as_json:
            records = [[dict(zip(heads, row, strict=True)) for row in cells] for _, heads, cells in tables]
            print_json([{"table": table[0], "rows": rows} for table, rows in zip(tables, records, strict=True)])
        else:
            for table in tables:
                print_table(*table)
        text = paper_tables_markdown(rows)
    else:
        if as_json:
            print_json([asdict(row) for row in rows])
        else:
            print_rows(rows)
        text = markdown(rows)
    if csv is not None:
        _write(csv, csv_text(rows), quiet=as_json)
    if out is not None and (out.suffix == ".md" or paper):
        _write(out, text, quiet=as_json)
    elif out is not None:
        page = render_comparison(folders, out)
        if not as_json:
            say(f"Comparison: {page}")


def comparison_rows(folders: Sequence[Path]) -> "list[PaperRow]":
    """Read finished runs and return the rows of their table; a line names each run that is left out."""
    from softprune.lab.report import distinct, load_run, paper_rows

    runs, repeats = distinct([load_run(folder) for folder in folders])
    for repeat in repeats:
        remark(printable(f"Left out: {repeat}"))
    return paper_rows(runs)


def print_rows(rows: "Sequence[PaperRow]") -> None:
    """Print the table without columns that are the same everywhere."""
    from softprune.lab.report import table_cells

    heads, cells = table_cells(rows)
    where = {(row.data, row.model) for row in rows}
    title = printable("{1} on {0}".format(*where.pop())) if len(where) == 1 else ""
    columns = dict(zip(heads, zip(*cells, strict=True), strict=True))
    unneeded = _unneeded(columns)
    columns = {"FT" if head == "fine-tuned" else head: columns[head] for head in heads if head not in unneeded}
    left_out = print_table(title, list(columns), list(zip(*columns.values(), strict=True)), _optional(columns))
    if left_out:
        shown = {head.partition(", ")[0] for head in columns if head not in left_out}
        bases = dict.fromkeys(head.partition(", ")[0] for head in left_out)
        names = ", ".join(f"{base} of the paper" if base in shown else base for base in bases)
        say(f"Not shown at this width: {names}. --csv FILE and --json have all columns.", wrap=True)


def _write(path: Path, text: str, *, quiet: bool) -> None:
    write_atomically(path, text.encode(errors="replace"), then="compare again")
    if not quiet:
        say(f"Table: {path}")


def _unneeded(columns: Columns) -> set[str]:
    """Columns that are the same everywhere, or the same as another one."""
    same = {head for head in ("data", "model", "n", "fine-tuned", "front") if len(set(columns[head])) == 1}
    if not {"data", "model"} <= same:
        same -= {"data", "model"}
    empty = {head for head, cells in columns.items() if set(cells) == {"-"}}
    pairs = zip(columns["compact"], columns["last"], strict=True)
    repeated = {"compact"} if all(compact in (last, "-") for compact, last in pairs) else set()
    return same | empty | repeated


def _optional(columns: Columns) -> list[str]:
    """Columns that a narrow terminal can do without, the least important ones first."""
    order = ["minutes", "front", "channels cut", "FLOPs cut", "compact", "n", "baseline", "best"]
    found = [head for name in order for head in reversed(columns) if head.partition(", ")[0] == name]
    found += [head for head in columns if head.endswith(", paper") and head not in found]
    names = [columns[head] for head in ("data", "model", "method", "FT") if head in columns]
    distinct = len(set(zip(*names, strict=True))) == len(columns["method"])
    found.append("run" if distinct else "method")  # one of the two says which row is which
    return [*found, "data"] if len(set(columns.get("data", ()))) == 1 else found


def _finished(given: Sequence[Path]) -> list[Path]:
    """Return the finished runs among these folders and in sweeps; a line names each run that is left out."""
    found = [RunFolder(folder) for path in given for folder in _runs_in(path)]
    finished = [run.path for run in found if run.result.is_file()]
    if not finished and len(found) == 1:
        found[0].read_result()  # raises with a remedy
    if not finished:
        raise ConfigError(
            f"A comparison must have a finished run. Got none among the {len(found)} in "
            f"{', '.join(map(str, given))}. Run `softprune resume RUN` to finish one."
        )
    for run in found:
        if run.path not in finished:
            why = f"is not finished; `{run.resume_command}` finishes it" if run.config.is_file() else "holds no run"
            remark(f"Left out: {run.path} {why}.")
    return finished


def _runs_in(path: Path) -> list[Path]:
    """Return the path itself, or the runs of a sweep in it, finished or not."""
    if not path.exists():
        raise ConfigError(f"A run to compare must be a folder. Got {path}, which does not exist.")
    if (path / "config.toml").is_file() or (path / "result.json").is_file():
        return [path]
    files = (file for name in ("config.toml", "result.json") for file in path.glob(f"*/{name}"))
    return sorted({file.parent for file in files}) or [path]
