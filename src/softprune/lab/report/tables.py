"""The comparison as text: a table for the terminal, Markdown and CSV, and the tables of the paper."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from softprune.errors import printable
from softprune.lab.report.grouping import Spread
from softprune.lab.report.paper_table import PaperFigures, PaperRow, paper_table_rows


@dataclass(frozen=True)
class PaperColumn:
    """A column of figures: ours, a field of PaperRow, and the paper's, a field of PaperFigures where it has one."""

    head: str
    digits: int
    ours: str
    paper: str = ""

    @property
    def whose(self) -> tuple[str, ...]:
        """Whose figures the column has, from left to right."""
        return ("paper", "ours") if self.paper else ("ours",)

    def texts(self, row: PaperRow | None, figures: PaperFigures | None) -> list[str]:
        """Ours and, where the paper has the column, the paper's; a dash for what is unknown."""
        texts = ["-" if row is None else _spread_text(getattr(row, self.ours), self.digits)]
        return [*texts, _number(getattr(figures, self.paper, None), self.digits)] if self.paper else texts


COLUMNS = (
    PaperColumn("baseline", 2, "baseline", "baseline"),
    PaperColumn("last", 2, "last"),
    PaperColumn("best", 2, "best", "top1"),
    PaperColumn("compact", 2, "compact"),
    PaperColumn("drop", 2, "drop", "drop"),
    PaperColumn("channels cut", 1, "channels", "channels"),
    PaperColumn("params cut", 1, "params", "params"),
    PaperColumn("FLOPs cut", 1, "flops", "flops"),
    PaperColumn("MACs cut", 1, "macs"),
    PaperColumn("minutes", 1, "minutes"),
)
LATENCY = (
    PaperColumn("dense ms", 2, "dense_ms"),
    PaperColumn("compact ms", 2, "compact_ms"),
    PaperColumn("speed-up", 2, "speed_up"),
)
"""Columns of the tables on ImageNet, whose inference time the paper reports in its text."""
LATENCIES = (
    "Dense and compact ms: latency of both networks, and speed-up their ratio, as `softprune bench RUN --out "
    "RUN/bench.json` measured them for as many images as the run, in the setting in which the compact network is "
    "fastest; without it as measured at the end of the run, where runs at the same time on one device distort it."
)
STAND_IN = "ours on Tiny-ImageNet as a stand-in for ImageNet: compare the drops and cuts, not the accuracies"
TEXTS = ("data", "model", "method", "fine-tuned", "run", "n")
EXPLANATION = (
    "Percent; mean ± sample standard deviation over n runs that differ only in their seed. Baseline: top-1 of "
    "the dense network after its last epoch. Last and best: top-1 of the pruned network after the last epoch, "
    "and at its best test epoch, which the paper reports. Compact: the network that was written. Drop: "
    "baseline minus last. Channels, params and FLOPs are counted as in the paper where it has a rule for the "
    "network, and exactly elsewhere; MACs are exact. Columns with the word paper hold the figures that the "
    "paper reports for the same recipe. Fine-tuned: after the cut; such a run also gives the row before it. "
    "Front: no other row of the same network has both fewer MACs and a higher accuracy. Minutes: wall time of "
    "the whole run; runs at the same time on one device slow each other down."
)


def table_cells(rows: Sequence[PaperRow]) -> tuple[list[str], list[list[str]]]:
    """Heads of the columns, and cells. The columns of the paper appear if a row has its figures."""
    quoted = any(row.paper is not None for row in rows)
    heads, cells = list(TEXTS), [_texts(row) for row in rows]
    for column in COLUMNS:
        added = [f"{column.head}, ours", f"{column.head}, paper"] if quoted and column.paper else [column.head]
        heads += added
        for row, line in zip(rows, cells, strict=True):
            line += column.texts(row, row.paper)[: len(added)]
    return [*heads, "front"], [[*line, _yes(row.on_front)] for row, line in zip(rows, cells, strict=True)]


def markdown(rows: Sequence[PaperRow]) -> str:
    """The table in Markdown with an explanation of its columns."""
    return f"{markdown_table(*table_cells(rows))}\n{EXPLANATION} {_precision(rows)}\n"


def markdown_table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, without what it would read as a column, HTML, code or a link."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for line in cells:
        escaped = (re.sub(r"([\\|`\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;") for text in line)
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join([*lines, ""])


def csv_text(rows: Sequence[PaperRow]) -> str:
    """The table as CSV in full precision: mean and deviation of ours, and the figures of the paper."""
    heads = list(TEXTS)
    # A spreadsheet takes text that begins so as a formula.
    lines: list[list[object]] = [
        [f"'{text}" if text.startswith(("=", "+", "-", "@")) else text for text in _texts(row)] for row in rows
    ]
    for column in COLUMNS:
        heads += [f"{column.head} {part}" for part in ("mean", "deviation", "paper")[: 3 if column.paper else 2]]
        for row, line in zip(rows, lines, strict=True):
            ours = getattr(row, column.ours)
            line += [ours.mean, ours.deviation]
            line += [getattr(row.paper, column.paper, None)] if column.paper else []
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow([*heads, "front"])
    writer.writerows([*line, _yes(row.on_front)] for row, line in zip(rows, lines, strict=True))
    return content.getvalue()


def paper_tables(rows: Sequence[PaperRow]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, heads, cells) of each table of the paper: its rows with our figures, dashes where there is no run.

    Rows of ImageNet without a run show the run on Tiny-ImageNet, if there is one; row and title say so.
    """
    # The compact network is what is deployed. That of SFP and FPGM is less accurate than what their authors evaluate.
    columns = [column for column in COLUMNS if column.paper or column.head == "compact"]
    ours = {row.paper.recipe: row for row in rows if row.paper is not None}
    small = {row.name: row for row in rows if row.name.startswith("tinyimagenet-")}
    tables = []
    for number, group in groupby(paper_table_rows(), key=lambda figures: figures.table):
        figures = list(group)
        title, lines = f"Table {number} of the paper", []
        more = LATENCY if any(figure.stand_in for figure in figures) else ()
        for figure in figures:
            row, name = ours.get(figure.recipe), figure.recipe
            if row is None and figure.stand_in in small:
                row, name = small[figure.stand_in], f"{name} (ours: {figure.stand_in})"
                title = f"Table {number} of the paper, {STAND_IN}"
            line = [name, "-" if row is None else str(row.n)]
            for column in columns:
                line += reversed(column.texts(row, figure))
            lines.append([*line, *(text for column in more for text in column.texts(row, figure))])
        heads = ["recipe", "runs", *(f"{c.head}, {whose}" for c in columns for whose in c.whose)]
        tables.append((title, [*heads, *(f"{column.head}, ours" for column in more)], lines))
    return tables


def paper_tables_markdown(rows: Sequence[PaperRow]) -> str:
    """All tables of the paper in Markdown."""
    parts = [f"## {title}\n\n{markdown_table(heads, cells)}" for title, heads, cells in paper_tables(rows)]
    return "\n".join(["# The tables of the paper\n", *parts, f"{EXPLANATION} {LATENCIES} {_precision(rows)}\n"])


def _texts(row: PaperRow) -> list[str]:
    """The cells before the figures, without control characters."""
    run = f"{row.name} ({row.apart})" if row.apart else row.name
    return [*map(printable, (row.data, row.model, row.method, _yes(row.finetuned), run, str(row.n)))]


def _precision(rows: Sequence[PaperRow]) -> str:
    """A sentence: the precision of most rows, and the names of the others."""
    (usual, _), *others = Counter(row.precision for row in rows).most_common() or [("an unknown precision", 0)]
    named = [
        f"{other}: {', '.join(dict.fromkeys(printable(row.name) for row in rows if row.precision == other))}"
        for other, _ in others
    ]
    return "; in ".join([f"Trained in {usual}", *named]) + "."


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread_text(value: Spread, digits: int) -> str:
    mean = _number(value.mean, digits)
    return mean if value.deviation is None else f"{mean} ± {value.deviation:.{digits}f}"
