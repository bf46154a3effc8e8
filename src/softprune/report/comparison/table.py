"""The table of a comparison: mean and spread over seeds per experiment, and every run behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from softprune.report.comparison.legend import style_of
from softprune.report.figures import cell, figure, fold, section, table
from softprune.report.formats import accuracy, change, cut, duration, percent
from softprune.report.grouping import Group, Spread, over
from softprune.report.markup import Markup, el
from softprune.report.signs import MINUS, PLUS_MINUS, UNKNOWN
from softprune.runs.records import Moment, Run

Get = Callable[[Run], float | None]


def _of(moment: Moment | None) -> float | None:
    return moment.top1 if moment else None


def _against_dense(run: Run) -> float | None:
    shipped, dense = run.shipped_top1, run.dense_top1
    return None if shipped is None or dense is None else shipped - dense


COLUMNS: tuple[tuple[str, int, Get], ...] = (
    ("Dense top-1", 2, lambda run: run.dense_top1),
    ("Best top-1", 2, lambda run: _of(run.best)),
    ("Shipped top-1", 2, lambda run: run.shipped_top1),
    ("Against dense", 2, _against_dense),
    ("MACs cut %", 1, lambda run: cut(run.dense.macs, run.compact.macs)),
    ("Params cut %", 1, lambda run: cut(run.dense.params, run.compact.params)),
    ("Channels cut %", 1, lambda run: cut(run.dense.channels, run.compact.channels)),
    ("Paper FLOPs cut %", 1, lambda run: cut(run.dense.paper_flops, run.compact.paper_flops)),
)

RUN_HEAD = (
    ("Run", ""),
    ("Seed", "n"),
    ("Best top-1", "n"),
    ("Shipped top-1", "n"),
    ("Against dense", "n"),
    ("MACs cut", "n"),
    ("Params cut", "n"),
    ("Time", "n"),
)


def summary_table(groups: Sequence[Group], out: Path) -> Markup:
    columns = [column for column in COLUMNS if any(over(group, column[2]).n for group in groups)]
    head = [("Experiment", ""), ("Runs", "n"), *((label, "n") for label, _, _ in columns)]
    rows = []
    for index, group in enumerate(groups):
        cells = [_spread(over(group, get), digits) for _, digits, get in columns]
        name = el("th", el("span", class_=f"swatch {style_of(index)}"), " ", group.label, scope="row")
        rows.append(el("tr", name, cell(len(group.runs), len(group.runs)), *cells))
    repeated = any(len(group.runs) > 1 for group in groups)
    lead = "The best epoch is chosen by test accuracy; shipped is the compact network as it was written."
    if any(run.baseline_top1 is not None for group in groups for run in group.runs):
        lead += " Runs that trained no dense network are held against the dense runs of the same training among these."
    if repeated:
        lead += f" Mean {PLUS_MINUS} sample standard deviation over seeds."
    every = [_run(run, index, out) for index, group in enumerate(groups) for run in group.runs]
    return section(
        "table",
        "Mean and spread",
        lead,
        figure("summary", table(head, rows, "Experiments", "sortable")),
        fold(
            f"All {sum(len(group.runs) for group in groups)} runs",
            table(RUN_HEAD, every, "Every run", "sortable"),
        ),
    )


def _spread(value: Spread, digits: int) -> Markup:
    if value.mean is None:
        return cell(UNKNOWN)
    text = f"{value.mean:.{digits}f}".replace("-", MINUS)
    note = None if value.deviation is None else el("small", f"{PLUS_MINUS} {value.deviation:.{digits}f}")
    return el("td", text, note, class_="n", data_value=repr(value.mean))


def _run(run: Run, index: int, out: Path) -> Markup:
    shipped, against = run.shipped_top1, _against_dense(run)
    macs, params = cut(run.dense.macs, run.compact.macs), cut(run.dense.params, run.compact.params)
    report = run.path / "report.html"
    # quote() also keeps a folder called "javascript:..." from being a scheme.
    link = quote(os.path.relpath(report, out.parent)) if report.is_file() else None
    name = el("a", run.name, href=link) if link else run.name
    return el(
        "tr",
        el("th", el("span", class_=f"swatch {style_of(index)}"), " ", name, scope="row"),
        cell(UNKNOWN if run.seed is None else run.seed, run.seed),
        cell(accuracy(_of(run.best)), _of(run.best)),
        cell(accuracy(shipped), shipped),
        cell(change(against), against),
        cell(percent(macs), macs),
        cell(percent(params), params),
        cell(duration(run.wall_seconds), run.wall_seconds),
    )
