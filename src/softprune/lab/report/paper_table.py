"""The paper's table for a set of runs: a row per method, network and fine-tuning, with the paper's figures."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from softprune.lab.config.method import TITLES
from softprune.lab.report.grouping import Spread, distinct, experiment_key, shared, spread, tell_apart, with_baselines
from softprune.lab.report.pareto import Spot, front
from softprune.lab.report.text import cut, known_as
from softprune.lab.report.training import precision_of
from softprune.lab.runs.reading import Run, best_latencies

SAME_FLOPS = 1.0
"""Allowed difference in points between the paper's FLOPs reduction and a target in exact MACs."""
FT = "-ft"
"""Suffix of recipes with fine-tuning. Without it, it is the recipe without fine-tuning."""


@dataclass(frozen=True)
class PaperFigures:
    """A row of a table of the paper, in percent. None where the table has no such figure."""

    recipe: str
    table: int
    baseline: float | None = None
    top1: float | None = None
    drop: float | None = None
    """Points of top-1 below the paper's own baseline."""
    channels: float | None = None
    params: float | None = None
    flops: float | None = None

    @property
    def stand_in(self) -> str | None:
        """The recipe of the same row on Tiny-ImageNet, for ImageNet's."""
        name = self.recipe
        return name.replace("imagenet-", "tinyimagenet-", 1) if name.startswith("imagenet-") else None


@cache
def paper_table_rows() -> tuple[PaperFigures, ...]:
    """Every row of tables 1 to 8, in the paper's order. A run may be a row of several tables."""
    with (Path(__file__).parent / "paper.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            PaperFigures(
                recipe=row.pop("recipe"),
                table=int(row.pop("table")),
                **{name: float(value) for name, value in row.items() if value},
            )
            for row in csv.DictReader(file)
        )


@cache
def paper_figures() -> dict[str, PaperFigures]:
    """The rows by the name of the recipe that reproduces them; of several tables, the first."""
    return {row.recipe: row for row in reversed(paper_table_rows())}


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
    precision: str
    """Of the training, in words."""
    n: int
    baseline: Spread
    last: Spread
    best: Spread
    compact: Spread
    drop: Spread
    channels: Spread
    params: Spread
    flops: Spread
    macs: Spread
    minutes: Spread
    dense_ms: Spread
    compact_ms: Spread
    """Latencies, of bench.json or measured at the end of the run."""
    speed_up: Spread
    """Latency of the dense network divided by that of the compact one."""
    paper: PaperFigures | None
    on_front: bool = False
    """Whether no row of the same data and network has fewer MACs and at least its accuracy, or more at the same."""


@dataclass(frozen=True)
class _Entry:
    """A run as a row of the table. A fine-tuned run gives two."""

    run: Run
    name: str
    finetuned: bool
    latencies: tuple[float, float] | None
    last: float | None
    best: float | None = None
    compact: float | None = None
    seconds: float | None = None

    def less(self, *keys: str) -> float | None:
        """What was removed in percent, by the first of these counts that the record has."""
        counted = next(key for key in keys if getattr(self.run.dense, key) is not None)
        return cut(getattr(self.run.dense, counted), getattr(self.run.compact, counted))


def paper_rows(runs: Sequence[Run]) -> list[PaperRow]:
    """Return the rows by data set, network and the order of the runs.

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
        key = (run.data, run.model, _label(run), entry.name, entry.finetuned)
        alike.setdefault(key, {}).setdefault(experiment_key(run), []).append(entry)
    networks: dict[tuple[str, str], list[PaperRow]] = {}
    for (data, model, method, *_), experiments in alike.items():
        members = list(experiments.values())
        apart = tell_apart([each[0].run for each in members]) if len(members) > 1 else [""]
        rows = networks.setdefault((known_as(data), known_as(model)), [])
        rows += [_row(method, text, each) for text, each in zip(apart, members, strict=True)]
    return [row for rows in networks.values() for row in _with_front(rows)]


def _with_front(rows: Sequence[PaperRow]) -> list[PaperRow]:
    """The rows of a network, dense ones first, with those on the Pareto front marked."""
    spots = [(row, _spot(row)) for row in sorted(rows, key=lambda row: row.method != "Dense")]
    best = front([spot for _, spot in spots if spot is not None])
    return [replace(row, on_front=spot in best) for row, spot in spots]


def _spot(row: PaperRow) -> Spot | None:
    """The row by the share of the MACs that it keeps, or None without it. A dense network keeps all."""
    accuracy = row.compact.mean if row.compact.mean is not None else row.last.mean
    cut = 0.0 if row.method == "Dense" else row.macs.mean
    return None if accuracy is None or cut is None else Spot(100 - cut, accuracy)


def _entries(run: Run) -> list[_Entry]:
    last, best = (None if moment is None else moment.top1 for moment in (run.last, run.best))
    times = best_latencies(run)
    after = _Entry(run, run.name, run.finetuned, times, last, best, run.compact_top1, run.wall_seconds)
    before = run.variant("masked")
    if not run.finetuned or before is None:
        return [after]
    return [_Entry(run, run.name.removesuffix(FT), finetuned=False, latencies=times, last=before.top1), after]


def _label(run: Run) -> str:
    if run.method == "dense":
        return "Dense"
    title = TITLES.get(run.method, run.method)
    return f"{title} without ReLU" if not run.config.masks.use_relu else title


def _row(method: str, apart: str, members: Sequence[_Entry]) -> PaperRow:
    first = members[0]

    def over(get: Callable[[_Entry], float | None]) -> Spread:
        return spread(map(get, members))

    def pruned(get: Callable[[_Entry], float | None]) -> Spread:
        return spread(()) if method == "Dense" else over(get)

    return PaperRow(
        data=known_as(first.run.data),
        model=known_as(first.run.model),
        method=method,
        name=first.name,
        apart=apart,
        finetuned=first.finetuned,
        precision=" and ".join(sorted({precision_of(entry.run) for entry in members})),
        n=len(members),
        baseline=shared(over(lambda entry: entry.run.dense_top1)),
        last=over(lambda entry: entry.last),
        best=over(lambda entry: entry.best),
        compact=over(lambda entry: entry.compact),
        drop=pruned(_drop),
        channels=pruned(_channels_cut),
        params=pruned(lambda entry: entry.less("paper_params", "params")),
        flops=pruned(lambda entry: entry.less("paper_flops", "macs")),
        macs=pruned(lambda entry: entry.less("macs")),
        minutes=over(lambda entry: None if entry.seconds is None else entry.seconds / 60),
        dense_ms=pruned(lambda entry: entry.latencies and entry.latencies[0]),
        compact_ms=pruned(lambda entry: entry.latencies and entry.latencies[1]),
        speed_up=pruned(lambda entry: entry.latencies and entry.latencies[0] / entry.latencies[1]),
        paper=_figures(first.name, first.run),
    )


def _figures(name: str, run: Run) -> PaperFigures | None:
    """The row of the paper for the recipe of this name; None for another network or another target."""
    figures = paper_figures().get(name)
    if figures is None or f"-{run.model}-" not in name:
        return None
    target = run.config.method.target
    if not target:
        return figures
    # Where the paper gives no strength, the recipe has its FLOPs reduction as a target.
    share = target.get("macs")
    if not isinstance(share, float) or figures.flops is None:
        return None
    return figures if abs(100 - 100 * share - figures.flops) <= SAME_FLOPS else None


def _drop(entry: _Entry) -> float | None:
    baseline = entry.run.dense_top1
    return None if baseline is None or entry.last is None else baseline - entry.last


def _channels_cut(entry: _Entry) -> float | None:
    """As the paper counts where its rules are known, else of the sites."""
    run = entry.run
    if run.dense.paper_channels is not None or not run.sites:
        return entry.less("paper_channels", "channels")
    return cut(sum(site.width for site in run.sites), sum(site.kept for site in run.sites))
