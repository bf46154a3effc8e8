"""The paper's table for a set of runs: a row per method, network and fine-tuning, with the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from softprune.report.grouping import Spread, distinct, identity, spread, tell_apart, with_baselines
from softprune.report.paper import PaperFigures, paper_figures
from softprune.report.text import cut, known_as
from softprune.runs.records import Moment, Run, Totals

SAME_FLOPS = 1.0
"""Allowed difference in points between the paper's FLOPs reduction and a target in exact MACs."""
FT = "-ft"
"""Suffix of recipes with fine-tuning. Without it, it is the recipe without fine-tuning."""


@dataclass(frozen=True)
class PaperRow:
    """Means and spreads over runs that differ only in their seed."""

    data: str
    model: str
    method: str
    name: str
    apart: str
    """The difference from other rows of the same name, empty if there is none."""
    finetuned: bool
    n: int
    baseline: Spread
    last: Spread
    best: Spread
    shipped: Spread
    drop: Spread
    channels: Spread
    params: Spread
    flops: Spread
    macs: Spread
    minutes: Spread
    paper: PaperFigures | None


@dataclass(frozen=True)
class _Entry:
    """A run as a row of the table. A fine-tuned run gives two."""

    run: Run
    name: str
    finetuned: bool
    last: float | None
    best: float | None
    shipped: float | None
    seconds: float | None


def paper_rows(runs: Sequence[Run], titles: Mapping[str, str] | None = None) -> list[PaperRow]:
    """Return the rows by data set, network and the order of the runs. `titles` names the methods.

    Of several runs with one configuration and seed the newest is used.
    """
    entries = [entry for run in with_baselines(distinct(runs)[0]) for entry in _entries(run)]
    names = {(e.run.data, e.run.model, e.name) for e in entries if e.run.name == e.name}
    # Rows with the same texts and their experiments: runs of one name may differ in their settings.
    alike: dict[tuple[str, str, str, str, bool], dict[str, list[_Entry]]] = {}
    for entry in entries:
        run = entry.run
        # A fine-tuned run before fine-tuning is a row only if no other run has that row.
        if entry.name != run.name and (run.data, run.model, entry.name) in names:
            continue
        key = (run.data, run.model, _label(run, titles or {}), entry.name, entry.finetuned)
        alike.setdefault(key, {}).setdefault(identity(run), []).append(entry)
    rows = [row for key, experiments in alike.items() for row in _rows(*key, list(experiments.values()))]
    order = {key: number for number, key in enumerate(dict.fromkeys((row.data, row.model) for row in rows))}
    return sorted(rows, key=lambda row: (order[row.data, row.model], row.method != "Dense"))


def _entries(run: Run) -> list[_Entry]:
    last, best = _top1(run.last), _top1(run.best)
    entries = [_Entry(run, run.name, run.finetuned, last, best, run.shipped_top1, run.wall_seconds)]
    before = run.variant("masked")
    if run.finetuned and before is not None:
        entries.insert(0, _Entry(run, run.name.removesuffix(FT), False, before.top1, None, None, None))
    return entries


def _label(run: Run, titles: Mapping[str, str]) -> str:
    if run.method == "dense":
        return "Dense"
    title = titles.get(run.method, run.method)
    return f"{title} without ReLU" if run.masks.get("use_relu") is False else title


def _rows(
    data: str, model: str, method: str, name: str, finetuned: bool, experiments: Sequence[Sequence[_Entry]]
) -> list[PaperRow]:
    rows = [_row(data, model, method, name, finetuned, members) for members in experiments]
    if len(rows) == 1:
        return rows
    apart = tell_apart([members[0].run for members in experiments])
    return [replace(row, apart=text) for row, text in zip(rows, apart, strict=True)]


def _row(
    data: str, model: str, method: str, name: str, finetuned: bool, members: Sequence[_Entry]
) -> PaperRow:
    def over(get: Callable[[_Entry], float | None]) -> Spread:
        return spread(get(entry) for entry in members)

    def less(get: Callable[[Totals], float | None]) -> Spread:
        if method == "Dense":
            return Spread(None, None, 0)
        return over(lambda entry: cut(get(entry.run.dense), get(entry.run.compact)))

    dense = method == "Dense"
    return PaperRow(
        data=known_as(data),
        model=known_as(model),
        method=method,
        name=name,
        apart="",
        finetuned=finetuned,
        n=len(members),
        baseline=_shared(over(lambda entry: entry.run.dense_top1)),
        last=over(lambda entry: entry.last),
        best=over(lambda entry: entry.best),
        shipped=over(lambda entry: entry.shipped),
        drop=Spread(None, None, 0) if dense else over(_drop),
        channels=less(lambda totals: _first(totals.paper_channels, totals.channels)),
        params=less(lambda totals: _first(totals.paper_params, totals.params)),
        flops=less(lambda totals: _first(totals.paper_flops, totals.macs)),
        macs=less(lambda totals: totals.macs),
        minutes=over(lambda entry: None if entry.seconds is None else entry.seconds / 60),
        paper=_figures(name, members[0].run),
    )


def _figures(name: str, run: Run) -> PaperFigures | None:
    """The row of the paper for the recipe of this name; None for another network or another target."""
    figures = paper_figures().get(name)
    if figures is None or f"-{run.model}-" not in name:
        return None
    target = run.config.get("method", {}).get("target")
    if not target:
        return figures
    # Where the paper gives no strength, the recipe has its FLOPs reduction as a target.
    share = target.get("macs")
    if not isinstance(share, float) or figures.flops is None:
        return None
    return figures if abs(100 - 100 * share - figures.flops) <= SAME_FLOPS else None


def _shared(baseline: Spread) -> Spread:
    """Without a deviation if all runs have the same baseline."""
    return baseline if baseline.deviation else Spread(baseline.mean, None, baseline.n)


def _drop(entry: _Entry) -> float | None:
    baseline = entry.run.dense_top1
    return None if baseline is None or entry.last is None else baseline - entry.last


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _top1(moment: Moment | None) -> float | None:
    return moment.top1 if moment else None


# --- as text -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    head: str
    digits: int
    ours: Callable[[PaperRow], Spread]
    theirs: Callable[[PaperFigures], float | None] | None = None


COLUMNS = (
    _Column("baseline", 2, lambda row: row.baseline, lambda paper: paper.baseline),
    _Column("acc. last", 2, lambda row: row.last),
    _Column("acc. best", 2, lambda row: row.best, lambda paper: paper.top1),
    _Column("compact", 2, lambda row: row.shipped),
    _Column("drop", 2, lambda row: row.drop, lambda paper: paper.drop),
    _Column("channels cut", 1, lambda row: row.channels, lambda paper: paper.channels),
    _Column("params cut", 1, lambda row: row.params, lambda paper: paper.params),
    _Column("FLOPs cut", 1, lambda row: row.flops, lambda paper: paper.flops),
    _Column("MACs cut", 1, lambda row: row.macs),
    _Column("minutes", 1, lambda row: row.minutes),
)


def table_cells(rows: Sequence[PaperRow]) -> tuple[list[str], list[list[str]]]:
    """The table as text: column heads and cells. The columns of the paper appear if a row has its figures."""
    quoted = any(row.paper is not None for row in rows)
    heads = ["data", "model", "method", "FT", "run", "n"]
    cells = [
        [row.data, row.model, row.method, "O" if row.finetuned else "X", _run_cell(row), str(row.n)]
        for row in rows
    ]
    for column in COLUMNS:
        heads.append(column.head)
        for row, line in zip(rows, cells, strict=True):
            line.append(_text(column.ours(row), column.digits))
        if quoted and column.theirs is not None:
            heads.append("paper")
            for row, line in zip(rows, cells, strict=True):
                figure = None if row.paper is None else column.theirs(row.paper)
                line.append("-" if figure is None else f"{figure:.{column.digits}f}")
    return heads, cells


def markdown(rows: Sequence[PaperRow]) -> str:
    """The table in Markdown with an explanation of its columns."""
    heads, cells = table_cells(rows)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([*lines, "", EXPLANATION, ""])


EXPLANATION = (
    "Percent; mean ± sample standard deviation over the n runs that differ in their seed alone. Baseline: the dense "
    "network's top-1 after its last epoch. Acc. last and best: the pruned network after the last epoch, and at its "
    "best test epoch, which is what the paper reports. Compact: the network that was written. Drop: baseline minus "
    "last. Channels, params and FLOPs as the paper counts them where it has a rule for the network, exact elsewhere; "
    "MACs exact. FT: fine-tuned after the cut; such a run also gives the row before it. "
    "Minutes: wall time of the whole run; trainings side by side on one device slow each other."
)


def _run_cell(row: PaperRow) -> str:
    return f"{row.name} ({row.apart})" if row.apart else row.name


def _text(value: Spread, digits: int) -> str:
    if value.mean is None:
        return "-"
    mean = f"{value.mean:.{digits}f}"
    return mean if value.deviation is None else f"{mean} ± {value.deviation:.{digits}f}"
