"""Accuracy and pruning ratio against epochs (the paper's figure 4), and every epoch as a table."""

from __future__ import annotations

from collections.abc import Callable

from softprune.report.curves import ACCURACY, REMOVED, Mark, Series, curves_data, draw_curves, events_of
from softprune.report.figures import cell, figure, fold, legend, section, table, twice
from softprune.report.formats import accuracy, count, cut, percent, significant
from softprune.report.markup import Markup, el
from softprune.runs.records import Epoch, Run

COLUMNS = (
    "Epoch",
    "lr",
    "Train loss",
    "Train top-1",
    "Test loss",
    "Test top-1",
    "Test top-5",
    "Channels",
    "Parameters",
    "MACs",
)


def epochs(run: Run) -> Markup | None:
    lines = [line for line in _series(run) if line.known]
    if not lines:
        return None
    events = events_of(run.epochs)
    return section(
        "epochs",
        "Accuracy and pruning, epoch by epoch",
        "Above, how well the network classifies with its masks as they stand; below, what they remove. "
        + ("Dotted lines mark where the training changed." if events else "Both share one time axis."),
        figure(
            "epochs",
            legend([(line.style, line.label) for line in lines], "narrow-only"),
            twice(
                lambda canvas: draw_curves(
                    canvas,
                    lines,
                    "Accuracy and share removed against epochs",
                    _summary(run),
                    events,
                    _best(run),
                    end_labels=True,
                )
            ),
            el("p", class_="readout", aria_live="polite"),
            data=curves_data(lines),
        ),
        fold(f"All {len(run.epochs)} epochs as a table", _table(run)),
    )


def _series(run: Run) -> list[Series]:
    at = tuple(row.number for row in run.epochs)
    dense = run.dense

    def line(label: str, style: str, panel: int, get: Callable[[Epoch], float | None]) -> Series:
        return Series(label, style, panel, at, tuple(get(row) for row in run.epochs))

    return [
        line("test top-1", "s-test", ACCURACY, lambda row: row.test_top1),
        line("train top-1", "s-train", ACCURACY, lambda row: row.train_top1),
        line("parameters removed", "s-params", REMOVED, lambda row: cut(dense.params, row.totals.params)),
        line("channels removed", "s-channels", REMOVED, lambda row: cut(dense.channels, row.totals.channels)),
        line("MACs removed", "s-macs", REMOVED, lambda row: cut(dense.macs, row.totals.macs)),
    ]


def _best(run: Run) -> Mark | None:
    best = run.best
    if best is None or best.number is None or best.top1 is None:
        return None
    return Mark(best.number, best.top1, f"best {accuracy(best.top1)}, epoch {best.number}")


def _summary(run: Run) -> str:
    last = run.epochs[-1]
    removed = percent(cut(run.dense.macs, last.totals.macs))
    return f"In epoch {last.number}: test top-1 {accuracy(last.test_top1)} percent, {removed} of the MACs removed"


def _table(run: Run) -> Markup:
    rows = [
        el(
            "tr",
            cell(row.number, row.number),
            cell(significant(row.lr), row.lr),
            cell(significant(row.train_loss, 4), row.train_loss),
            cell(accuracy(row.train_top1), row.train_top1),
            cell(significant(row.test_loss, 4), row.test_loss),
            cell(accuracy(row.test_top1), row.test_top1),
            cell(accuracy(row.test_top5), row.test_top5),
            cell(count(row.totals.channels), row.totals.channels),
            cell(count(row.totals.params), row.totals.params),
            cell(count(row.totals.macs), row.totals.macs),
        )
        for row in run.epochs
    ]
    return table([(label, "n") for label in COLUMNS], rows, "Every epoch", "sortable")
