"""Accuracy and MACs removed against epochs, all runs in one chart: thin a run, bold the mean of its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from softprune.report.comparison.legend import group_legend, style_of
from softprune.report.curves import ACCURACY, REMOVED, Series, curves_data, draw_curves, events_of
from softprune.report.figures import figure, section, twice
from softprune.report.formats import cut
from softprune.report.grouping import Group, spread
from softprune.report.markup import Markup, el
from softprune.runs.records import Epoch, Run

Get = Callable[[Run, Epoch], float | None]
PANELS: tuple[tuple[int, str, Get], ...] = (
    (ACCURACY, "", lambda run, row: row.test_top1),
    (REMOVED, ", removed", lambda run, row: cut(run.dense.macs, row.totals.macs)),
)


def overlay(groups: Sequence[Group]) -> Markup | None:
    lines = [line for index, group in enumerate(groups) for line in _lines(index, group) if line.known]
    if not lines:
        return None
    longest = max((run for group in groups for run in group.runs), key=lambda run: len(run.epochs))
    repeated = any(len(group.runs) > 1 for group in groups)
    return section(
        "epochs",
        "Epoch by epoch",
        "Test accuracy above, the share of the MACs removed below."
        + (" Thin lines are single runs, bold lines their mean." if repeated else ""),
        figure(
            "epochs",
            group_legend(groups, switches=True),
            twice(
                lambda canvas: draw_curves(
                    canvas,
                    lines,
                    "Accuracy and MACs removed against epochs",
                    f"{sum(len(group.runs) for group in groups)} runs in {len(groups)} experiments",
                    events_of(longest.epochs),
                )
            ),
            el("p", class_="readout", aria_live="polite"),
            data=curves_data(lines),
        ),
    )


def _lines(index: int, group: Group) -> Iterator[Series]:
    style = style_of(index)
    for panel, suffix, get in PANELS:
        rows = [{row.number: get(run, row) for row in run.epochs} for run in group.runs]
        if len(rows) > 1:
            for values in rows:
                at = tuple(sorted(values))
                yield Series(
                    "", f"{style} thin", panel, at, tuple(values[e] for e in at), index, background=True
                )
        at = tuple(sorted({epoch for values in rows for epoch in values}))
        means = tuple(spread(values.get(epoch) for values in rows).mean for epoch in at)
        yield Series(f"{group.label}{suffix}", style, panel, at, means, index)
