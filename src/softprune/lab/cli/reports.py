"""`report` and `compare`: pages and tables from the records of runs."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softprune.errors import ConfigError
from softprune.io import write_atomically
from softprune.lab.cli.app import Json, Run, command
from softprune.lab.cli.output import format_count, format_cut, format_percent, print_json, print_table, remark, say
from softprune.lab.runs.folder import RunFolder, read_metrics
from softprune.lab.runs.result import Result

if TYPE_CHECKING:
    from softprune.lab.report.table import Row

_IMPLAUSIBLE = 1.5
"""Above this multiple of the MAC reduction a speed-up is reported with a remark, as it is below 1."""
_OPTIONAL = ("minutes", "front", "channels cut", "params cut", "best", "method", "n", "dense", "data")
"""Columns that a narrow terminal can do without, the least important ones first."""


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
    as_json: Json = False,
) -> None:
    """Compare finished runs in a table.

    The table has the accuracy of the dense and the compact network, and the reduction of channels, parameters, MACs and
    latency. Runs that differ only in their seed are averaged. The dense network is that of the run itself
    (train.dense_baseline), or the mean of the dense runs of the same training (network, data, epochs, optimizer,
    schedule) among those compared. Unfinished runs, and runs with the configuration and seed of a newer one, are left
    out and named.
    """
    from softprune.lab.report import render_comparison
    from softprune.lab.report.table import markdown

    folders = _finished(runs)
    rows = comparison_rows(folders)
    if as_json:
        print_json([row.facts() for row in rows])
    else:
        print_rows(rows)
    if out is None:
        return
    if out.suffix == ".md":
        write_atomically(out, markdown(rows).encode(errors="replace"), then="compare again")
    else:
        render_comparison(folders, out)
    if not as_json:
        say(f"Comparison: {out}")


def comparison_rows(folders: Sequence[Path]) -> "list[Row]":
    """Read finished runs and return the rows of their table; a line names each run that is left out."""
    from softprune.lab.report.table import experiments, rows_of
    from softprune.lab.runs.folder import load_run

    groups, repeats = experiments([load_run(folder) for folder in folders])
    for repeat in repeats:
        remark(f"Left out: {repeat}")
    return rows_of(groups)


def print_rows(rows: "Sequence[Row]") -> None:
    """Print the table without columns that are the same everywhere, and the warnings of the runs."""
    from softprune.lab.report.table import cells_of

    heads, cells = cells_of(rows)
    columns = dict(zip(heads, zip(*cells, strict=True), strict=True))
    one_network = len({(row.data, row.model) for row in rows}) == 1
    same = {head for head in ("n", "front") if len(set(columns[head])) == 1}
    same |= {"data", "model"} if one_network else set()
    columns = {head: column for head, column in columns.items() if head not in same}
    title = f"{rows[0].model} on {rows[0].data}" if one_network else ""
    left_out = print_table(title, list(columns), list(zip(*columns.values(), strict=True)), _OPTIONAL)
    if left_out:
        say(f"Not shown at this width: {', '.join(left_out)}. --json has all columns.", wrap=True)
    for row in rows:
        for text in row.warnings:
            remark(f"{row.run}: {text}")


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
