"""The paper's tables 1 to 8 beside our runs, from paper.csv and results/runs.csv.

    python benchmarks/render.py    # writes them into results/README.md and README.md

Accuracies and cuts are in percent, and cuts are counted as the paper counts. Needs only the standard library.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
SAME_FLOPS = 1.0
"""Points by which a target in MACs may differ from the paper's FLOPs reduction for a run to be the paper's row."""
Record = dict[str, str]
"""A row of runs.csv."""


@dataclass(frozen=True)
class PaperRow:
    """A row of a table of the paper. None where the table has no such figure."""

    table: int
    recipe: str
    baseline: float | None
    top1: float | None
    drop: float | None
    """Points below the paper's own baseline."""
    channels: float | None
    params: float | None
    flops: float | None

    @property
    def recipes(self) -> tuple[str, ...]:
        """Names of the runs of this row: a row of ImageNet has a stand-in on Tiny-ImageNet."""
        name = self.recipe
        return (name, name.replace("imagenet-", "tinyimagenet-", 1)) if name.startswith("imagenet-") else (name,)


def paper_rows() -> list[PaperRow]:
    """Return every row of tables 1 to 8, in the paper's order. A run may be a row of several tables."""
    with (HERE / "paper.csv").open(encoding="utf-8", newline="") as file:
        return [
            PaperRow(int(row.pop("table")), row.pop("recipe"), **{k: float(v) if v else None for k, v in row.items()})
            for row in csv.DictReader(file)
        ]


def runs() -> list[Record]:
    """Return the rows of runs.csv that have a record of their own in results/."""
    return [row for row in all_runs() if row["folder"] and "/" not in row["folder"]]


def all_runs() -> list[Record]:
    """Return the rows of runs.csv."""
    with (RESULTS / "runs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Measured:
    """Our runs of a row of the paper, which differ only in their seed."""

    runs: tuple[Record, ...]
    before_finetuning: bool
    """The row is that of a fine-tuned run before its fine-tuning."""
    baselines: tuple[float, ...]

    def values(self, column: str) -> tuple[float, ...]:
        """Return what the runs have in a column of runs.csv."""
        if self.before_finetuning and column in ("best_top1", "compact_top1"):
            return ()
        if self.before_finetuning and column == "last_top1":
            column = "masked_top1"
        return tuple(float(run[column]) for run in self.runs if run[column])


def measured(row: PaperRow, records: Sequence[Record]) -> Measured | None:
    """Return our runs of a row of the paper; None without a record."""
    for name in row.recipes:
        own = [run for run in records if run["name"].replace("-without-relu", "-norelu") == name and _is(run, row)]
        tuned = [run for run in records if run["name"] == f"{name}-ft" and _is(run, row)]
        if found := own or tuned:
            return Measured(tuple(found), not own, baselines(found, records))
    return None


def _is(run: Record, row: PaperRow) -> bool:
    """Return whether a run with a target has that of the paper. The paper gives strengths for some rows alone."""
    key, _, share = run["target"].partition("=")
    if key != "macs" or row.flops is None:
        return True
    return abs(100 - 100 * float(share) - row.flops) <= SAME_FLOPS


def baselines(found: Sequence[Record], records: Sequence[Record]) -> tuple[float, ...]:
    """Return the accuracy of the dense network of each run: its own, or that of the dense runs beside it."""
    dense = [run for run in records if run["method"] == "dense" and run["name"].endswith("-dense")]
    beside = [
        float(run["last_top1"])
        for run in dense
        if (run["data"], run["network"]) == (found[0]["data"], found[0]["network"])
        and run["name"].split("-")[0] == found[0]["name"].split("-")[0]
    ]
    own = [float(run["dense_top1"]) for run in found if run["dense_top1"]]
    return tuple(own or beside)


def figure(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, with the deviation of several values."""
    if not values:
        return "-"
    text = f"{mean(values):.{digits}f}"
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table; the first ``left`` columns are texts."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def paper_table(number_of_table: int) -> str:
    """Return a table of the paper, with our figures beside the paper's."""
    rows, records = [row for row in paper_rows() if row.table == number_of_table], runs()
    found = [measured(row, records) for row in rows]
    head = ["recipe", "runs", "dense", "paper", "best", "paper", "last", "drop", "paper"]
    head += ["channels cut", "paper", "params cut", "paper", "FLOPs cut", "paper"]
    timed = any(each and each.values("compact_ms") and each.runs[0]["data"] == "folder" for each in found)
    return markdown([*head, *(["dense ms", "compact ms"] if timed else [])], [
        _cells(row, ours, timed=timed) for row, ours in zip(rows, found, strict=True)
    ])  # fmt: skip


def _cells(row: PaperRow, ours: Measured | None, *, timed: bool) -> list[str]:
    title = row.recipe
    paper = [number(row.baseline), number(row.top1), number(row.drop)]
    cuts = [number(row.channels, 1), number(row.params, 1), number(row.flops, 1)]
    if ours is None:
        cells = [title, "-", "-", paper[0], "-", paper[1], "-", "-", paper[2]]
        return [*cells, *(cell for cut in cuts for cell in ("-", cut)), *(["-", "-"] if timed else [])]
    if ours.runs[0]["data"] == "folder":
        title += " (ours: Tiny-ImageNet)"
    last = ours.values("last_top1")
    drops = [mean(ours.baselines) - value for value in last] if ours.baselines else []
    cells = [title, str(len(ours.runs)), number(mean(ours.baselines) if ours.baselines else None), paper[0]]
    cells += [figure(ours.values("best_top1")), paper[1], figure(last), figure(drops), paper[2]]
    for column, cut in zip(("paper_channels_cut", "paper_params_cut", "paper_flops_cut"), cuts, strict=True):
        cells += [figure(ours.values(column), 1), cut]
    return [*cells, *([figure(ours.values("dense_ms")), figure(ours.values("compact_ms"))] if timed else [])]
