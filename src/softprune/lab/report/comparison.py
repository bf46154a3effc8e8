"""Aggregate runs that differ only in the seed into rows with mean, spread, label and baseline."""

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
"""Settings and sections, each with a trailing dot, that do not change the experiment, such as its seed and paths."""
TRAINING = ("model.", "data.", "optimizer.", "schedule.", "train.epochs.", "train.label_smoothing.")
"""Settings and sections that a dense run must share with a pruned run to be its baseline."""


class Spread(NamedTuple):
    """Mean and sample standard deviation over ``n`` runs; the deviation is None for fewer than two."""

    mean: float | None
    deviation: float | None
    n: int

    def text(self, digits: int = 2) -> str:
        """Format as ``mean ± deviation``; a dash if unknown."""
        if self.mean is None:
            return "-"
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.deviation else "")


@dataclass(frozen=True)
class Row:
    """An experiment: runs that differ only in the seed."""

    label: str
    runs: tuple[Run, ...]
    numbers: dict[str, Spread]
    """Mean and spread of each of the QUANTITIES, by column head."""
    on_front: bool
    """Whether the row is on the Pareto front of MACs and accuracy of its network."""

    @property
    def names(self) -> dict[str, Any]:
        run = self.runs[0]
        place = {"data": known_as(run.data), "model": known_as(run.model)}
        return {**place, "method": method_of(run), "run": self.label, "n": len(self.runs)}

    def facts(self) -> dict[str, Any]:
        """Return the row as a dictionary for JSON."""
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
"""For each column head, a function that returns the number of a run, and the number of decimals to show."""
EXPLANATION = (
    "Percent; mean ± sample standard deviation over n runs that differ only in the seed. Dense, compact: top-1 "
    "accuracy of the dense and of the compact network; best: of the masked network at its best epoch. Cut: reduction "
    "relative to the dense network. Speed-up: ratio of the latencies measured at the end of the run. "
    "Front: no row of the network has fewer MACs and a higher accuracy."
)


def compare_runs(runs: Sequence[Run]) -> tuple[list[Row], list[str]]:
    """Return a row per experiment, grouped by network with dense runs first, and a message per run left out."""
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
    """Return the Pareto front of points (cost, accuracy), in order of cost."""
    kept: list[tuple[float, float]] = []
    for spot in sorted(spots, key=lambda each: (each[0], -each[1])):
        if not kept or spot[1] > kept[-1][1]:
            kept.append(spot)
    return kept


def spread(values: Iterable[float | None]) -> Spread:
    """Return mean and deviation of the values that are not None."""
    known = [value for value in values if value is not None]
    return Spread(fmean(known) if known else None, stdev(known) if len(known) > 1 else None, len(known))


def method_of(run: Run) -> str:
    """Return the display name of a run's method."""
    title = run.method.upper() if len(run.method) <= 4 else run.method  # SCP, FPGM, L1; taylor, my_methods:Mine
    return title if run.config.masks.use_relu else f"{title} without ReLU"


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the table, without quantities that are unknown in all rows."""
    shown = [head for head in QUANTITIES if any(row.numbers[head].mean is not None for row in rows)]
    heads = ["data", "model", "method", "run", "n", *shown, "front"]
    cells = []
    for row in rows:
        numbers = [row.numbers[head].text(QUANTITIES[head][1]) for head in shown]
        cells.append([*map(str, row.names.values()), *numbers, "yes" if row.on_front else "no"])
    return heads, cells


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Group items by key, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def distinct(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest run of each configuration and seed, and a message for each run left out."""
    kept, repeats = [], []
    for group in _grouped(runs, lambda run: (experiment_key(run), run.seed)):
        newest = max(group, key=lambda run: run.finished)
        kept.append(newest)
        others = (run.path for run in group if run is not newest)
        repeats += [f"{path} has the configuration and seed of {newest.path}, which is newer." for path in others]
    return kept, repeats


def with_baselines(runs: Sequence[Run]) -> list[Run]:
    """Give runs without a dense baseline the mean accuracy of the dense runs with the same training settings.

    If any run of an experiment has its own baseline, only such baselines are used, so that kinds are not mixed.
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
    """Return network, data and the training settings that determine the accuracy of a dense network."""
    return [run.model, run.data, {key: value for key, value in settings(run).items() if f"{key}.".startswith(TRAINING)}]


def settings(run: Run) -> dict[str, Any]:
    """Return the flat configuration without incidental settings and without settings that have no effect."""
    values = dict(flat_settings(config_to_dict(run.config)))
    dropped = INCIDENTAL
    if run.method == "dense":
        dropped += ("method.",)
    elif run.config.method.target:
        dropped += ("method.strength.",)  # not used with a target
    if run.config.schedule.kind != "step":
        dropped += ("schedule.milestones.", "schedule.factor.")
    return {key: _of_any_seed(value) for key, value in values.items() if not f"{key}.".startswith(dropped)}


def _of_any_seed(value: Any) -> Any:
    """Strip parent folders and the seed from a path, such as .../scp-seed0, since both differ between repetitions."""
    if not isinstance(value, str) or "/" not in value:
        return value
    return re.sub(r"(?<![a-zA-Z])(seed|s)([-_=]?)\d+$", r"\1\2*", value.rpartition("/")[2])


def experiment_key(run: Run) -> str:
    """Return a string that is equal for runs that differ only in the seed."""
    return json.dumps([run.model, run.data, run.method, sorted(settings(run).items())], default=str)


def labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a label per group: the common name of its runs, plus differing settings if groups share a name."""
    names = [_common_name(group) for group in groups]
    found = []
    for group, name in zip(groups, names, strict=True):
        sharing = [other[0] for other, its in zip(groups, names, strict=True) if its == name and other is not group]
        found.append(" · ".join(filter(None, [name, *_differences(group[0], sharing)])))
    numbers = [found[: index + 1].count(label) for index, label in enumerate(found)]  # for labels still the same
    return [label if number == 1 else f"{label} ({number})" for label, number in zip(found, numbers, strict=True)]


def _common_name(group: Sequence[Run]) -> str:
    if len(group) == 1:
        return group[0].name
    prefix = os.path.commonprefix([run.name for run in group])  # noqa: RUF071 - letters, not parts of paths
    # Keep names that end in s or in a digit, such as sss and vgg16.
    return re.sub(r"([-_. ]+(seed|s)?|[-_. ]*seed)[-_. =]*\d*$", "", prefix)


def _differences(run: Run, others: Sequence[Run]) -> list[str]:
    """Return at most three settings in which a run differs from the others, settings of the method first."""
    mine, theirs = settings(run), [settings(other) for other in others]
    keys = sorted(mine, key=lambda key: not key.startswith("method."))
    differing = [key for key in keys if any(other.get(key) != mine[key] for other in theirs)]
    shown = [(key.rpartition(".")[2], mine[key]) for key in differing[:3]]
    return [f"{leaf} {value:.3g}" if isinstance(value, float) else f"{leaf} {value}" for leaf, value in shown]
