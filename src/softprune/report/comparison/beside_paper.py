"""The paper's figures beside ours: the table that `softprune compare` prints, on the page."""

from __future__ import annotations

from collections.abc import Sequence

from softprune.report.figures import cell, figure, section, table
from softprune.report.markup import Markup, el
from softprune.report.paper_table import EXPLANATION, PaperRow, table_cells
from softprune.report.signs import MINUS, PLUS_MINUS, UNKNOWN


def beside_paper(rows: Sequence[PaperRow]) -> Markup | None:
    """The section, or None where no run repeats one of the paper's rows."""
    if all(row.paper is None for row in rows):
        return None
    heads, lines = table_cells(rows)
    first_number = heads.index("n")
    kinds = ["" if position < first_number else "n" for position in range(len(heads))]
    body = [el("tr", *(_cell(text, kind) for text, kind in zip(line, kinds, strict=True))) for line in lines]
    head = list(zip(heads, kinds, strict=True))
    ours_and_theirs = table(head, body, "Our figures and the paper's", "wrap")
    lead = "The columns named paper hold what the paper reports of the same recipe."
    return section(
        "paper", "Beside the paper", lead, figure("beside-paper", ours_and_theirs, caption=EXPLANATION)
    )


def _cell(text: str, kind: str) -> Markup:
    if not kind:
        return cell(text, class_="")
    mean, sign, deviation = text.partition(f" {PLUS_MINUS} ")
    note = el("small", f"{PLUS_MINUS} {deviation}") if sign else None
    return el("td", UNKNOWN if mean == "-" else mean.replace("-", MINUS), note, class_=kind)
