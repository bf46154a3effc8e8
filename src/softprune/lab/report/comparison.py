"""Runs that differ only in their seed make one row: its mean and spread, its label and its baseline."""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from softprune.lab.config.recipes import config_to_dict, flat_settings
from softprune.lab.report.text import cut, known_as
from softprune.lab.runs.result import Run

INCIDENTAL: tuple[str, ...] = ("seed.", "name.", "records.", "train.mode.", "train.dense_baseline.", "data.dir.")
INCIDENTAL += ("data.workers.",)
"""Settings and tables of the place and the repetition of a run, which do not change what was done; with a dot."""
TRAINING = ("model.", "data.", "optimizer.", "schedule.", "train.epochs.", "train.label_smoothing.")
"""Settings and tables that a dense network must share with a run to be its baseline."""


class Spread(NamedTuple):
    """Mean and sample standard deviation over the ``n`` runs with the value. The deviation needs two runs."""

    mean: float | None
    deviation: float | None
    n: int

    def text(self, digits: int = 2) -> str:
        """Return mean and deviation as text; a dash for what is unknown."""
        if self.mean is None:
            return "-"
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.deviation else "")


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[Run, ...]
    numbers: dict[str, Spread]
    """By the head of their quantity."""
    on_front: bool
    """Whether no row of the same network has fewer MACs and at least its accuracy, or more at the same."""

    @property
    def names(self) -> dict[str, Any]:
        run = self.runs[0]
        place = {"data": known_as(run.data), "model": known_as(run.model)}
        return {**place, "method": method_of(run), "run": self.label, "n": len(self.runs)}

    def facts(self) -> dict[str, Any]:
        """Return the row for JSON."""
        numbers = {head.replace(" ", "_").replace("-", "_"): each._asdict() for head, each in self.numbers.items()}
        return {**self.names, **numbers, "front": self.on_front}


def _pruned(get: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    return lambda run: None if run.method == "dense" else get(run)


def _removed(key: str) -> Callable[[Run], float | None]:
    return _pruned(lambda run: cut(getattr(run.dense, key), getattr(run.compact, key)))


def _change(run: Run) -> float | None:
    compact, dense = run.compact_top1, run.dense_top1
    return None if compact is None or dense is None else compact - dense


QUANTITIES: dict[str, tuple[Callable[[Run], float | None], int]] = {
    "dense": (lambda run: run.dense_top1, 2),
    "best": (lambda run: run.best.top1, 2),
    "compact": (lambda run: run.compact_top1, 2),
    "change": (_pruned(_change), 2),
    "channels cut": (_removed("channels"), 1),
    "params cut": (_removed("params"), 1),
    "MACs cut": (_removed("macs"), 1),
    "activations cut": (_removed("activations"), 1),
    "speed-up": (_pruned(lambda run: run.speed_up), 2),
    "minutes": (lambda run: run.wall_seconds / 60, 1),
}
"""By the head of its column, a number of every run and the digits of its mean and deviation over seeds."""
EXPLANATION = (
    "Percent; mean ± sample standard deviation over n runs that differ only in their seed. Dense, compact: top-1 of "
    "the dense network and of the one that was written; best: of the masked network at its best epoch. Cut: what was "
    "removed. Speed-up: of the latency at the end of the run. "
    "Front: no row of the network has fewer MACs and a higher accuracy."
)


def compare_runs(runs: Sequence[Run]) -> tuple[list[Row], list[str]]:
    """Return a row per experiment, by network with the dense one first, and a sentence for each run left out."""
    found, repeats = distinct(runs)
    groups = _grouped(with_baselines(found), experiment_key)
    named = list(zip(labels(groups), groups, strict=True))
    rows = []
    for network in _grouped(named, lambda each: (each[1][0].data, each[1][0].model)):
        network.sort(key=lambda each: each[1][0].method != "dense")
        numbers = [{head: spread(map(get, group)) for head, (get, _) in QUANTITIES.items()} for _, group in network]
        spots = [(100 - (each["MACs cut"].mean or 0.0), each["compact"].mean or 0.0) for each in numbers]
        best = front(spots)
        rows += [
            Row(label, tuple(group), each, spot in best)
            for (label, group), each, spot in zip(network, numbers, spots, strict=True)
        ]
    return rows, repeats


def front(spots: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of (cost, accuracy): what no other matches at less cost or beats at the same."""
    kept: list[tuple[float, float]] = []
    for spot in sorted(spots, key=lambda each: (each[0], -each[1])):
        if not kept or spot[1] > kept[-1][1]:
            kept.append(spot)
    return kept


def spread(values: Iterable[float | None]) -> Spread:
    """Return mean and deviation of the known values."""
    known = [value for value in values if value is not None]
    return Spread(fmean(known) if known else None, stdev(known) if len(known) > 1 else None, len(known))


def method_of(run: Run) -> str:
    """Return the title of a run's method."""
    title = run.method.upper() if len(run.method) <= 4 else run.method  # SCP, FPGM, L1; taylor, my_methods:Mine
    return title if run.config.masks.use_relu else f"{title} without ReLU"


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells, without the quantities that no row has."""
    shown = [head for head in QUANTITIES if any(row.numbers[head].mean is not None for row in rows)]
    heads = ["data", "model", "method", "run", "n", *shown, "front"]
    cells = []
    for row in rows:
        numbers = [row.numbers[head].text(QUANTITIES[head][1]) for head in shown]
        cells.append([*map(str, row.names.values()), *numbers, "yes" if row.on_front else "no"])
    return heads, cells


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return groups of items with the same key, in the order of their first item."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def distinct(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest run of each configuration and seed, and a sentence for each that is left out."""
    kept, repeats = [], []
    for group in _grouped(runs, lambda run: (experiment_key(run), run.seed)):
        newest = max(group, key=lambda run: run.finished)
        kept.append(newest)
        others = (run.path for run in group if run is not newest)
        repeats += [f"{path} has the configuration and seed of {newest.path}, which is newer." for path in others]
    return kept, repeats


def with_baselines(runs: Sequence[Run]) -> list[Run]:
    """Give runs without a dense baseline the mean accuracy of the dense runs of the same training.

    An experiment in which some run has its own baseline keeps it, so that no mean is over two kinds of baselines.
    """
    dense = [(_training(run), run.compact_top1) for run in runs if run.method == "dense"]
    provided = {experiment_key(run) for run in runs if run.dense_top1 is not None}
    found = []
    for run in runs:
        if run.method != "dense" and experiment_key(run) not in provided:
            own = _training(run)
            baseline = spread(top1 for other, top1 in dense if other == own).mean
            run = run.model_copy(update={"baseline_top1": baseline})
        found.append(run)
    return found


def _training(run: Run) -> list[Any]:
    """Return network, data and the settings on which the accuracy of a dense network depends, apart from pruning."""
    return [run.model, run.data, {key: value for key, value in settings(run).items() if f"{key}.".startswith(TRAINING)}]


def settings(run: Run) -> dict[str, Any]:
    """Return the flat configuration without incidental settings and settings without effect."""
    values = dict(flat_settings(config_to_dict(run.config)))
    dropped = INCIDENTAL
    if run.method == "dense":
        dropped += ("method.",)
    elif run.config.method.target:
        dropped += ("method.strength.",)  # a target chooses its strength
    if run.config.schedule.kind != "step":
        dropped += ("schedule.milestones.", "schedule.factor.")
    return {key: _of_any_seed(value) for key, value in values.items() if not f"{key}.".startswith(dropped)}


def _of_any_seed(value: Any) -> Any:
    """Return the name of a folder, such as .../scp-seed0, without its place and seed: those of another run."""
    if not isinstance(value, str) or "/" not in value:
        return value
    return re.sub(r"(?<![a-zA-Z])(seed|s)([-_=]?)\d+$", r"\1\2*", value.rpartition("/")[2])


def experiment_key(run: Run) -> str:
    """Return a text that is the same for runs that differ only in their seed."""
    return json.dumps([run.model, run.data, run.method, sorted(settings(run).items())], default=str)


def labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the common name of each group without the seed, and the differences where groups share a name."""
    names = [_common_name(group) for group in groups]
    found = []
    for group, name in zip(groups, names, strict=True):
        sharing = [other[0] for other, its in zip(groups, names, strict=True) if its == name and other is not group]
        found.append(" · ".join(filter(None, [name, *_differences(group[0], sharing)])))
    numbers = [found[: index + 1].count(label) for index, label in enumerate(found)]  # where they are still the same
    return [label if number == 1 else f"{label} ({number})" for label, number in zip(found, numbers, strict=True)]


def _common_name(group: Sequence[Run]) -> str:
    if len(group) == 1:
        return group[0].name
    prefix = os.path.commonprefix([run.name for run in group])  # noqa: RUF071 - letters, not parts of paths
    # The last letter or digit of a name stays: sss, vgg16.
    return re.sub(r"([-_. ]+(seed|s)?|[-_. ]*seed)[-_. =]*\d*$", "", prefix)


def _differences(run: Run, others: Sequence[Run]) -> list[str]:
    """Return at most three settings in which a run differs from the others, those of the method first."""
    mine, theirs = settings(run), [settings(other) for other in others]
    keys = sorted(mine, key=lambda key: not key.startswith("method."))
    differing = [key for key in keys if any(other.get(key) != mine[key] for other in theirs)]
    shown = [(key.rpartition(".")[2], mine[key]) for key in differing[:3]]
    return [f"{leaf} {value:.3g}" if isinstance(value, float) else f"{leaf} {value}" for leaf, value in shown]
