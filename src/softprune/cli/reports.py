"""`report` and `compare`: pages and tables from the records of runs."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from softprune.cli.app import command
from softprune.cli.output import percent, print_table, say
from softprune.cli.results import write_report
from softprune.cli.training import Run


@command
def report(run: Run) -> None:
    """Write the page of a run, also of one that still trains: RUN/report.html."""
    say(f"Report: {write_report(run)}")


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write a page to this file, such as comparison.html."),
    ] = None,
) -> None:
    """Compare finished runs: accuracy, drop and what was cut; runs that differ only in their seed are averaged."""
    from softprune.train.records import RunFolder

    results = [RunFolder(run).read_result() for run in runs]
    columns = [
        "data",
        "model",
        "method",
        "run",
        "n",
        "last %",
        "best %",
        "drop",
        "channels cut %",
        "params cut %",
    ]
    columns += ["MACs cut %", "paper FLOPs cut %"]
    print_table("", columns, comparison_rows(results))
    if out is not None:
        from softprune.report import render_comparison

        say(f"Comparison: {render_comparison(runs, out)}")


def comparison_rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per data set, network, method and name: means over seeds, with the standard deviation if several."""
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["data"], result["model"], result["method"], result["name"]].append(result)
    baselines = {key[:2]: members for key, members in groups.items() if key[2] == "dense"}
    rows = []
    for key, members in sorted(groups.items()):
        rows.append(
            [
                *key,
                str(len(members)),
                _spread([member["last"]["top1"] for member in members]),
                _spread([member["best"]["top1"] for member in members]),
                _spread(_drops(members, baselines.get(key[:2], []))),
                _spread([_cut(member, "channels") for member in members], 1),
                _spread([_cut(member, "params") for member in members], 1),
                _spread([_cut(member, "macs") for member in members], 1),
                _spread([_paper_cut(member) for member in members], 1),
            ]
        )
    return rows


def _drops(members: Sequence[dict[str, Any]], baselines: Sequence[dict[str, Any]]) -> list[float | None]:
    """Loss of accuracy at the last epoch against the run's own dense baseline, or that of the compared runs."""
    if members and members[0]["method"] == "dense":
        return [None]
    shared = [run["last"]["top1"] for run in baselines]
    drops: list[float | None] = []
    for member in members:
        own = next((row["top1"] for row in member["table"] if row["variant"] == "dense"), None)
        dense = own if own is not None else statistics.mean(shared) if shared else None
        drops.append(None if dense is None else dense - member["last"]["top1"])
    return drops


def _cut(result: dict[str, Any], key: str) -> float | None:
    before, after = result["dense"].get(key), result["compact"].get(key)
    return 100 * (1 - after / before) if before and after is not None else None


def _paper_cut(result: dict[str, Any]) -> float | None:
    before, after = result["dense"].get("paper"), result["compact"].get("paper")
    return 100 * (1 - after["flops"] / before["flops"]) if before and after else None


def _spread(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = percent(statistics.mean(known), digits)
    return mean if len(known) == 1 else f"{mean} +- {statistics.stdev(known):.{digits}f}"
