"""The comparison of runs as a table: for the terminal, Markdown, JSON and the page."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from softprune.errors import printable
from softprune.lab.config.method import TITLES
from softprune.lab.report.grouping import Experiment, Spread, distinct, group_runs, shared, spread, with_baselines
from softprune.lab.report.text import cut, known_as
from softprune.lab.runs.folder import Run, best_latencies


class Spot(NamedTuple):
    """A network by cost and accuracy."""

    cost: float
    top1: float


def front(spots: Sequence[Spot]) -> list[Spot]:
    """Return the Pareto front, cheapest first: spots that no other matches at less cost or beats at the same."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda each: (each.cost, -each.top1)):
        if not kept or spot.top1 > kept[-1].top1:
            kept.append(spot)
    return kept


class Column(NamedTuple):
    """A number of every run, of which the table shows the mean and the deviation over seeds."""

    head: str
    get: Callable[[Run], float | None]
    digits: int = 2


def _pruned(get: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    return lambda run: None if run.method == "dense" else get(run)


def _against_dense(run: Run) -> float | None:
    compact, dense = run.compact_top1, run.dense_top1
    return None if compact is None or dense is None else compact - dense


def _speed_up(run: Run) -> float | None:
    times = best_latencies(run)
    return times[0] / times[1] if times else None


COLUMNS = (
    Column("dense", lambda run: run.dense_top1),
    Column("best", lambda run: run.best.top1 if run.best else None),
    Column("compact", lambda run: run.compact_top1),
    Column("change", _pruned(_against_dense)),
    Column("channels cut", _pruned(lambda run: cut(run.dense.channels, run.compact.channels)), 1),
    Column("params cut", _pruned(lambda run: cut(run.dense.params, run.compact.params)), 1),
    Column("MACs cut", _pruned(lambda run: cut(run.dense.macs, run.compact.macs)), 1),
    Column("speed-up", _pruned(_speed_up)),
    Column("minutes", lambda run: run.wall_seconds / 60, 1),
)
EXPLANATION = (
    "Percent; mean ± sample standard deviation over n runs that differ only in their seed. Dense: top-1 of the dense "
    "network after its last epoch. Best: top-1 of the masked network at its best epoch. Compact: the network that was "
    "written; change: against the dense one. Cut: the share that was removed. Speed-up: latency of the dense network "
    "divided by that of the compact one, as `softprune bench RUN --out RUN/bench.json` measured it, or else at the end "
    "of the run. Minutes: wall time of the run. Front: no row of the network has fewer MACs and a higher accuracy."
)


@dataclass(frozen=True)
class Row:
    """An experiment: runs that differ only in their seed."""

    data: str
    model: str
    method: str
    run: str
    n: int
    numbers: dict[str, Spread]
    """By the head of their column."""
    warnings: tuple[str, ...]
    on_front: bool
    """Whether no row of the same network has fewer MACs and at least its accuracy, or more at the same."""

    def facts(self) -> dict[str, Any]:
        """Return the row for JSON."""
        names = {head.replace(" ", "_").replace("-", "_"): vars(value) for head, value in self.numbers.items()}
        texts = {key: getattr(self, key) for key in ("data", "model", "method", "run", "n")}
        return {**texts, **names, "front": self.on_front, "warnings": list(self.warnings)}


def experiments(runs: Sequence[Run]) -> tuple[list[Experiment], list[str]]:
    """Return the experiments among ``runs``, and a sentence for each run that a newer one replaces."""
    found, repeats = distinct(runs)
    return group_runs(with_baselines(found)), repeats


def rows_of(groups: Sequence[Experiment]) -> list[Row]:
    """Return the rows by network, the dense one first."""
    networks: dict[tuple[str, str], list[Experiment]] = {}
    for group in groups:
        networks.setdefault((group.runs[0].data, group.runs[0].model), []).append(group)
    return [
        row
        for members in networks.values()
        for row in _rows(sorted(members, key=lambda group: group.runs[0].method != "dense"))
    ]


def _rows(groups: Sequence[Experiment]) -> list[Row]:
    """Return the rows of one network."""
    numbers = [{column.head: spread(map(column.get, group.runs)) for column in COLUMNS} for group in groups]
    spots = [
        None if each["compact"].mean is None else Spot(100 - (each["MACs cut"].mean or 0.0), each["compact"].mean)
        for each in numbers
    ]
    best = front([spot for spot in spots if spot is not None])
    return [
        Row(
            data=known_as(group.runs[0].data),
            model=known_as(group.runs[0].model),
            method=method_of(group.runs[0]),
            run=group.label,
            n=len(group.runs),
            numbers={**each, "dense": shared(each["dense"])},
            warnings=tuple(dict.fromkeys(text for run in group.runs for text in run.warnings)),
            on_front=spot in best,
        )
        for group, each, spot in zip(groups, numbers, spots, strict=True)
    ]


def method_of(run: Run) -> str:
    """Return the title of a run's method."""
    if run.method == "dense":
        return "Dense"
    title = TITLES.get(run.method, run.method)
    return f"{title} without ReLU" if not run.config.masks.use_relu else title


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells, without the columns in which no row has a number."""
    columns = [column for column in COLUMNS if any(row.numbers[column.head].mean is not None for row in rows)]
    heads = ["data", "model", "method", "run", "n", *(column.head for column in columns), "front"]
    cells = [
        [
            *map(printable, (row.data, row.model, row.method, row.run, str(row.n))),
            *(spread_text(row.numbers[column.head], column.digits) for column in columns),
            "yes" if row.on_front else "no",
        ]
        for row in rows
    ]
    return heads, cells


def spread_text(value: Spread, digits: int) -> str:
    """Return mean and deviation as text; a dash for what is unknown."""
    if value.mean is None:
        return "-"
    return f"{value.mean:.{digits}f}" + ("" if value.deviation is None else f" ± {value.deviation:.{digits}f}")


def markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, with an explanation of its columns and the warnings of the runs."""
    notes = [f"- {printable(row.run)}: {printable(text)}" for row in rows for text in row.warnings]
    parts = [markdown_table(*cells_of(rows)), EXPLANATION, *(["Warnings:\n\n" + "\n".join(notes)] if notes else [])]
    return "\n".join(parts) + "\n"


def markdown_table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without what it would read as a column, HTML, code or a link."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for line in cells:
        escaped = (re.sub(r"([\\|`\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;") for text in line)
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join([*lines, ""])
