"""The page that compares runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from softprune.errors import ConfigError
from softprune.io import write_atomically
from softprune.report.comparison.beside_paper import beside_paper
from softprune.report.comparison.overlay import overlay
from softprune.report.comparison.pareto import pareto
from softprune.report.comparison.profiles import profiles
from softprune.report.comparison.table import summary_table
from softprune.report.document import document
from softprune.report.figures import fold
from softprune.report.grouping import Group, Repeat, distinct, group_runs, with_baselines
from softprune.report.markup import Markup, el
from softprune.report.naming import known_as
from softprune.report.paper_table import paper_rows
from softprune.report.sections.appendix import command
from softprune.runs.reading import load_run
from softprune.runs.records import Run


def render_comparison(
    run_dirs: Sequence[Path | str], out: Path | str, titles: Mapping[str, str] | None = None
) -> Path:
    """Write a self-contained HTML page that compares runs, and give its path.

    Runs whose configurations differ only in the seed are one experiment, shown with mean and spread; runs of the
    paper's recipes also with the paper's figures. `titles`: methods in words.

    Raises:
        ConfigError: no run was given.
        FileFormatError: a folder holds no run, or its records are not what softprune writes.
    """
    if not run_dirs:
        raise ConfigError(
            "A comparison needs at least one run folder. Got none. Name the folders to compare."
        )
    runs = [load_run(folder) for folder in run_dirs]
    target = Path(out)
    write_atomically(target, comparison_page(runs, target, titles).encode(), then="compare again")
    return target


def comparison_page(runs: Sequence[Run], out: Path, titles: Mapping[str, str] | None = None) -> str:
    """The page's HTML; links to the runs' own reports are relative to ``out``."""
    runs, repeats = distinct(runs)
    groups = group_runs(with_baselines(runs))
    parts = (
        _headline(runs, groups, repeats),
        summary_table(groups, out),
        beside_paper(paper_rows([run for run in runs if not run.in_progress], titles)),
        pareto(groups),
        overlay(groups),
        profiles(groups),
        _appendix(runs),
    )
    footer = el("p", "Made by softprune. This page is one file and fetches nothing.")
    return document(f"{_title(runs, groups)}: softprune", (part for part in parts if part), footer)


def _title(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    models, data = {run.model for run in runs}, {run.data for run in runs}
    what = known_as(next(iter(models))) if len(models) == 1 else f"{len(models)} networks"
    where = f" on {known_as(next(iter(data)))}" if len(data) == 1 and data != {""} else ""
    return f"{what}{where}: {len(groups)} experiment{'s' if len(groups) != 1 else ''}"


def _headline(runs: Sequence[Run], groups: Sequence[Group], repeats: Sequence[Repeat]) -> Markup:
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    facts = [("runs", str(len(runs))), ("seeds", ", ".join(map(str, seeds)))]
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    notes += map(str, repeats)
    if len({run.data for run in runs}) > 1:
        notes.append("These runs are on different data: their accuracies do not compare.")
    return el(
        "header",
        el("p", "softprune comparison", class_="kicker"),
        el("h1", _title(runs, groups)),
        el(
            "dl",
            *(el("div", el("dt", name), el("dd", value)) for name, value in facts if value),
            class_="facts",
        ),
        *(el("p", note, class_="note", role="status") for note in notes),
        class_="headline",
    )


def _appendix(runs: Sequence[Run]) -> Markup | None:
    commands = [command(run.command) for run in runs if run.command]
    if not commands:
        return None
    heading = el("h2", "To run it again", id="appendix-title")
    return el(
        "section", heading, fold(f"{len(commands)} commands", *commands), aria_labelledby="appendix-title"
    )
