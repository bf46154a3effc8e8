"""`report` and `compare`: pages and tables from the records of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from softprune.cli.app import command
from softprune.cli.options import Run
from softprune.cli.output import print_table, remark, say
from softprune.cli.results import method_titles, write_report
from softprune.errors import ConfigError


@command
def report(run: Run) -> None:
    """Write the page of a run, also of one that still trains: RUN/report.html."""
    say(f"Report: {write_report(run)}")


@command
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, or of whole sweeps.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Also write a page (comparison.html), or the table alone (comparison.md)."
        ),
    ] = None,
) -> None:
    """Compare finished runs in the paper's table, with the paper's own figures where it has them.

    Accuracy of the last and the best epoch, the drop against the dense network, and what was cut; runs that differ
    only in their seed are averaged. The dense network is that of the run itself (train.dense_baseline), or the mean
    of the dense runs of the same training (network, data, epochs, optimizer, schedule) among those compared. What is
    not finished, or repeats a newer run's configuration and seed, is left out, and a line says so.
    """
    folders = _finished(runs)
    table = print_comparison(folders)
    if out is None:
        return
    if out.suffix == ".md":
        from softprune.io import write_atomically

        write_atomically(out, table.encode(), then="compare again")
        say(f"Table: {out}")
        return
    from softprune.report import render_comparison

    say(f"Comparison: {render_comparison(folders, out, method_titles())}")


def print_comparison(folders: Sequence[Path]) -> str:
    """Print the paper's table for finished runs, and return it in Markdown."""
    from softprune.report import distinct, load_run, markdown, paper_rows, table_cells

    runs, repeats = distinct([load_run(folder) for folder in folders])
    for repeat in repeats:
        remark(f"Left out: {repeat}")
    rows = paper_rows(runs, method_titles())
    heads, cells = table_cells(rows)
    where = {(row.data, row.model) for row in rows}
    title = "{1} on {0}".format(*where.pop()) if len(where) == 1 else ""
    print_table(title, *_without(heads, cells, _unneeded(heads, cells)))
    return markdown(rows)


def _unneeded(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> set[int]:
    """Columns that tell nothing on a screen: the same everywhere, or the same as their neighbours."""
    same = {
        i
        for i, head in enumerate(heads)
        if head in ("data", "model", "n") and len({row[i] for row in cells}) == 1
    }
    if len({(row[0], row[1]) for row in cells}) > 1:
        same -= {0, 1}
    empty = {i for i in range(len(heads)) if all(row[i] == "-" for row in cells)}
    compact, last = heads.index("compact"), heads.index("acc. last")
    repeated = {compact} if all(row[compact] in (row[last], "-") for row in cells) else set()
    return same | empty | repeated


def _without(
    heads: Sequence[str], cells: Sequence[Sequence[str]], columns: set[int]
) -> tuple[list[str], list[list[str]]]:
    kept = [i for i in range(len(heads)) if i not in columns]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in cells]


def _finished(given: Sequence[Path]) -> list[Path]:
    """The finished runs among these folders and, where one is a sweep's, in it; says which are left out."""
    from softprune.runs.folder import RunFolder

    found = [folder for path in given for folder in _runs_in(path)]
    finished = [folder for folder in found if RunFolder(folder).result.is_file()]
    if not finished and len(found) == 1:
        RunFolder(found[0]).read_result()  # says what to do about it
    if not finished:
        raise ConfigError(
            f"A comparison must have a finished run. Got none among the {len(found)} in "
            f"{', '.join(map(str, given))}; `softprune resume RUN` finishes one."
        )
    for folder in found:
        if folder in finished:
            continue
        if (folder / "config.toml").is_file():
            remark(f"Left out: {folder} is not finished; `{RunFolder(folder).resume_command}` finishes it.")
        else:
            remark(f"Left out: {folder} holds no run.")
    return finished


def _runs_in(path: Path) -> list[Path]:
    """The path itself, or the runs of a sweep in it, finished or not."""
    if not path.exists():
        raise ConfigError(f"A run to compare must be a folder. Got {path}, which does not exist.")
    if (path / "config.toml").is_file() or (path / "result.json").is_file():
        return [path]
    files = (file for name in ("config.toml", "result.json") for file in path.glob(f"*/{name}"))
    return sorted({file.parent for file in files}) or [path]
