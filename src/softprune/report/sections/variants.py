"""The table dense / masked / compact: the same accuracy masked and compact, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence

from softprune.report.figures import cell, figure, section, table
from softprune.report.formats import accuracy, count, file_size, milliseconds, percent
from softprune.report.markup import Markup, el
from softprune.report.signs import MINUS
from softprune.runs.records import Run, Variant

EXPLAINED = {
    "dense": "the network without masks",
    "masked": "dropped channels multiplied by zero",
    "compact": "dropped channels gone",
}


def variants(run: Run) -> Markup | None:
    if not run.table:
        return None
    dense = run.variant("dense") or run.variant("masked")
    masked, compact = run.variant("masked"), run.variant("compact")
    lead = "What was trained, what was evaluated while training, and what you ship."
    if masked and compact and masked.top1 is not None and masked.top1 == compact.top1:
        lead += f" The masked and the compact network agree: {accuracy(compact.top1)} % top-1 each."
    return section(
        "variants",
        "Dense, masked, compact",
        lead,
        figure("variants", _by_row(run, dense), _by_column(run.table, dense)),
    )


def _by_row(run: Run, dense: Variant | None) -> Markup:
    """A row per network, for a desk."""
    head = [("Network", ""), *((label, "n") for label, _ in _columns(run.table[0], dense))]
    body = []
    for row in run.table:
        more = ", then fine-tuned" if row.name == "compact" and run.finetuned else ""
        name = el("th", row.name, el("small", EXPLAINED.get(row.name, "") + more), scope="row")
        style = f"variant-{row.name}" if row.name in EXPLAINED else None
        body.append(el("tr", name, *(content for _, content in _columns(row, dense)), class_=style))
    return el("div", table(head, body, "Dense, masked and compact", "still"), class_="wide")


def _by_column(rows: Sequence[Variant], dense: Variant | None) -> Markup:
    """A column per network, for a phone."""
    columns = [_columns(row, dense) for row in rows]
    head = [("", ""), *((row.name, "n") for row in rows)]
    body = [
        el("tr", el("th", label, scope="row"), *(column[index][1] for column in columns))
        for index, (label, _) in enumerate(columns[0])
    ]
    return el("div", table(head, body, "Dense, masked and compact", "still"), class_="narrow")


def _columns(row: Variant, dense: Variant | None) -> list[tuple[str, Markup]]:
    """(label, cell) for everything that is measured of a network."""
    return [
        ("Top-1 %", cell(accuracy(row.top1), row.top1)),
        ("Top-5 %", cell(accuracy(row.top5), row.top5)),
        ("Parameters", _compared(count(row.params), row.params, dense.params if dense else None)),
        ("MACs", _compared(count(row.macs), row.macs, dense.macs if dense else None)),
        ("File", _compared(file_size(row.file_bytes), row.file_bytes, dense.file_bytes if dense else None)),
        (
            "Latency",
            _compared(milliseconds(row.latency_ms), row.latency_ms, dense.latency_ms if dense else None),
        ),
    ]


def _compared(text: str, value: float | None, base: float | None) -> Markup:
    """The value, and under it how much less than dense that is."""
    note = None
    if value is not None and base and abs(value / base - 1) >= 0.005:
        share = 100 * (value / base - 1)
        note = el("small", f"{MINUS if share < 0 else '+'}{percent(abs(share), 0)}")
    return el("td", text, note, class_="n", data_value=None if value is None else repr(value))
