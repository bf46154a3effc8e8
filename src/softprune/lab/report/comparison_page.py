"""The page that compares runs."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from softprune.errors import ConfigError
from softprune.lab.report.curves import ACCURACY, REMOVED, Series, curves, events_of
from softprune.lab.report.grouping import Experiment, spread
from softprune.lab.report.layers import ROWS_SHOWN, profile
from softprune.lab.report.page import Column, style_of, write_page
from softprune.lab.report.scales import CANVASES
from softprune.lab.report.scatter import scatters
from softprune.lab.report.table import EXPLANATION, cells_of, experiments, rows_of
from softprune.lab.report.text import accuracy, cut, duration, known_as, percent
from softprune.lab.report.training import precision_of
from softprune.lab.runs.folder import Run, load_run


def render_comparison(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Write a self-contained HTML page that compares runs, and return its path.

    Runs whose configurations differ only in the seed are one experiment, shown with mean and spread. Runs of the
    paper's recipes are shown with the paper's figures.

    Raises:
        ConfigError: no run was given.
        FileFormatError: a folder holds no run, or its records are not what softprune writes.
    """
    if not run_dirs:
        raise ConfigError("A comparison needs at least one run folder. Got none. Name the folders to compare.")
    target = Path(out)
    groups, repeats = experiments([load_run(folder) for folder in run_dirs])
    runs = [run for group in groups for run in group.runs]
    heading = _heading(runs, groups)
    return write_page(
        target,
        "comparison.html",
        then="compare again",
        title=f"{heading}: softprune",
        version="",
        refresh=0,
        heading=heading,
        run_facts=[
            ("runs", len(runs)),
            ("seeds", ", ".join(map(str, sorted({run.seed for run in runs})))),
            ("precision", ", ".join(sorted({precision_of(run) for run in runs}))),
        ],
        notes=_notes(runs, repeats),
        groups=groups,
        summary=_summary(groups, target),
        scatters=scatters(groups),
        overlay=_overlay(groups),
        profiles=list(_profiles(groups)),
        commands=[run.command for run in runs if run.command],
    )


def _heading(runs: Sequence[Run], groups: Sequence[Experiment]) -> str:
    models, data = {run.model for run in runs}, {run.data for run in runs}
    what = known_as(next(iter(models))) if len(models) == 1 else f"{len(models)} networks"
    where = f" on {known_as(next(iter(data)))}" if len(data) == 1 and data != {""} else ""
    return f"{what}{where}: {len(groups)} experiment{'s' if len(groups) != 1 else ''}"


def _notes(runs: Sequence[Run], repeats: Sequence[str]) -> list[str]:
    notes = [*(f"{run.name}: {note}" for run in runs for note in (*run.warnings, *run.notes)), *repeats]
    if len({precision_of(run) for run in runs}) > 1:
        notes.append("These runs were trained in different precisions; the table of all runs has them.")
    if len({run.data for run in runs}) > 1:
        notes.append("These runs use different data. Their accuracies cannot be compared.")
    return notes


def _cut(run: Run, key: str) -> float | None:
    return None if run.method == "dense" else cut(getattr(run.dense, key), getattr(run.compact, key))


RUN_COLUMNS = (
    Column("Seed", lambda run: run.seed, str),
    Column("Best top-1", lambda run: run.best and run.best.top1, accuracy, "n spare"),
    Column("Compact top-1", lambda run: run.compact_top1, accuracy),
    Column("MACs cut", partial(_cut, key="macs"), percent),
    Column("Params cut", partial(_cut, key="params"), percent, "n spare"),
    Column("Precision", precision_of, str, "spare"),
    Column("Time", lambda run: run.wall_seconds, duration, "n spare"),
)


def _summary(groups: Sequence[Experiment], out: Path) -> dict[str, Any]:
    runs = [(index, run) for index, group in enumerate(groups) for run in group.runs]
    order = {group.label: index for index, group in enumerate(groups)}
    rows = rows_of(groups)
    heads, cells = cells_of(rows)
    used = " or ".join(sorted({run.evaluated_on for _, run in runs}, reverse=True))
    lead = f"The best epoch is chosen by {used} accuracy; compact is the network that was written."
    if any(run.baseline_top1 is not None for _, run in runs):
        lead += " Runs without a dense baseline are compared with the dense runs of the same training among these."
    return {
        "lead": lead,
        "heads": [("Experiment", ""), *((head, "n") for head in heads[4:])],
        "rows": [(order[row.run], row.run, line[4:]) for row, line in zip(rows, cells, strict=True)],
        "explanation": EXPLANATION,
        "run_columns": RUN_COLUMNS,
        "runs": [(index, run, _link(run, out)) for index, run in runs],
    }


def _link(run: Run, out: Path) -> str:
    """The report of a run, relative to the page; empty without one."""
    report = run.path / "report.html"
    # quote() also keeps a folder called "javascript:..." from being a scheme.
    return quote(os.fsencode(os.path.relpath(report, out.parent))) if report.is_file() else ""


def _overlay(groups: Sequence[Experiment]) -> dict[str, Any]:
    """All runs in one chart: thin lines are runs, bold lines the mean of a group."""
    lines = [line for index, group in enumerate(groups) for line in _lines(index, group)]
    longest = max((run for group in groups for run in group.runs), key=lambda run: len(run.epochs))
    runs = sum(len(group.runs) for group in groups)
    lead = "Accuracy above, the share of the MACs removed below."
    if runs > len(groups):
        lead += " Thin lines are single runs, bold lines their mean."
    title, description = "Accuracy and MACs removed against epochs", f"{runs} runs in {len(groups)} experiments"
    return {"lead": lead, "chart": curves(lines, title, description, events_of(longest.epochs))}


def _lines(index: int, group: Experiment) -> Iterator[Series]:
    style = style_of(index)
    for panel, suffix in ((ACCURACY, ""), (REMOVED, ", removed")):
        rows = [
            {row.number: row.test_top1 if panel is ACCURACY else cut(run.dense.macs, row.macs) for row in run.epochs}
            for run in group.runs
        ]
        if len(rows) > 1:
            for values in rows:
                yield Series("", f"{style} thin", panel, sorted(values.items()), index, background=True)
        epochs = sorted({epoch for values in rows for epoch in values})
        means = [(epoch, spread(values.get(epoch) for values in rows).mean) for epoch in epochs]
        yield Series(f"{group.label}{suffix}", style, panel, means, index)


def _profiles(groups: Sequence[Experiment]) -> Iterator[dict[str, Any]]:
    """The kept channels per layer, for each network that at least two experiments share."""
    networks: dict[tuple[str, tuple[tuple[str, int], ...]], list[int]] = {}
    for index, group in enumerate(groups):
        sites = tuple((site.name, site.width) for site in group.runs[0].sites)
        if sites:
            networks.setdefault((group.runs[0].model, sites), []).append(index)
    for (model, layers), members in networks.items():
        if len(members) < 2:
            continue
        kept = {index: _mean_kept(groups[index], layers) for index in members}
        columns = [(groups[index].label, "n spare") for index in members]
        yield {
            "model": model,
            "sites": layers,
            "kept": kept,
            "head": [("Layer", ""), ("0 to 100 % kept", "wide-cell"), ("Width", "n"), *columns],
            "drawings": [profile(canvas, layers, kept) for canvas in CANVASES] if len(layers) > ROWS_SHOWN else [],
        }


def _mean_kept(group: Experiment, sites: Sequence[tuple[str, int]]) -> list[float]:
    """Mean over the runs of a group whose sites are those of the first run."""
    same = [run for run in group.runs if [(site.name, site.width) for site in run.sites] == list(sites)]
    return [fmean(run.sites[position].kept for run in same) for position in range(len(sites))]
