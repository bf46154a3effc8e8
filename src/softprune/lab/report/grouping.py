"""Group runs that differ only in their seed, with mean and spread, labels and baselines."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from softprune.lab.config.recipes import config_to_dict, flat_settings
from softprune.lab.report.text import DOT, scientific
from softprune.lab.runs.folder import Run

INCIDENTAL = (
    *("seed.", "name.", "records.", "train.mode.", "train.dense_baseline."),
    *("data.dir.", "data.download.", "data.workers.", "data.eval_batch_size."),
)
"""Settings and tables of the place and the repetition of a run, which do not change what was done."""
TRAINING = ("model.", "data.", "optimizer.", "schedule.", "train.epochs.", "train.label_smoothing.")
"""Settings and tables that a dense network must share with a run to be its baseline."""
_OF_A_SCHEDULE = {"schedule.milestones": ("step",), "schedule.factor": ("step",)}


@dataclass(frozen=True)
class Experiment:
    """Runs of one experiment."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over the `n` runs with the value. The deviation needs two runs."""

    mean: float | None
    deviation: float | None
    n: int


def spread(values: Iterable[float | None]) -> Spread:
    """Mean and deviation of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return Spread(None, None, 0)
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def shared(baseline: Spread) -> Spread:
    """Return the spread without its deviation if all runs have the same baseline."""
    return baseline if baseline.deviation else Spread(baseline.mean, None, baseline.n)


def distinct(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest run of each configuration and seed, and a sentence for each that is left out."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((experiment_key(run), run.seed), []).append(run)
    newest = [max(group, key=lambda run: (not run.in_progress, run.finished)) for group in groups.values()]
    repeats = [
        f"{run.path} has the configuration and seed of {counted.path}, which is newer."
        for group, counted in zip(groups.values(), newest, strict=True)
        for run in group
        if run is not counted
    ]
    return [run for run in runs if any(run is counted for counted in newest)], repeats


def with_baselines(runs: Sequence[Run]) -> list[Run]:
    """Give runs without a dense baseline the mean accuracy of the dense runs of the same training.

    An experiment in which some run has its own baseline keeps it, so that no mean is over two kinds of baselines.
    """
    dense = [(training(run), run.compact_top1) for run in runs if run.method == "dense" and not run.in_progress]
    provided = {experiment_key(run) for run in runs if run.dense_top1 is not None}
    found = []
    for run in runs:
        if run.method != "dense" and experiment_key(run) not in provided:
            own = training(run)
            baseline = spread(top1 for other, top1 in dense if other == own).mean
            run = run.model_copy(update={"baseline_top1": baseline})
        found.append(run)
    return found


def training(run: Run) -> list[Any]:
    """Network, data and the settings on which the accuracy of a dense network depends, apart from pruning."""
    values = settings(run)
    kind = values.get("schedule.kind")
    unused = {key for key, kinds in _OF_A_SCHEDULE.items() if kind is not None and kind not in kinds}
    used = {key: value for key, value in values.items() if _among(key, TRAINING) and key not in unused}
    return [run.model, run.data, used]


def group_runs(runs: Sequence[Run]) -> list[Experiment]:
    """Return groups in the order of their first run, each with a unique label."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(experiment_key(run), []).append(run)
    groups = list(members.values())
    return [Experiment(label, tuple(group)) for label, group in zip(_labels(groups), groups, strict=True)]


def settings(run: Run) -> dict[str, Any]:
    """The flat configuration without incidental settings and settings without effect."""
    values = dict(flat_settings(config_to_dict(run.config)))
    targeted = any(key.startswith("method.target.") for key in values)
    dropped = [*INCIDENTAL, *(["method.strength."] if targeted else [])]  # a target chooses its strength
    dropped += ["method."] if run.method == "dense" else []
    return {key: _of_any_seed(value) for key, value in values.items() if not _among(key, dropped)}


def _among(key: str, names: Sequence[str]) -> bool:
    """Whether a setting, or a table that it is in, has one of these names, which end in a dot."""
    return f"{key}.".startswith(tuple(names))


def _of_any_seed(value: Any) -> Any:
    """A run that uses another one (a plan, weights) names a folder, such as .../scp-seed0: its place is incidental."""
    if not isinstance(value, str) or "/" not in value:
        return value
    return re.sub(r"(?<![a-zA-Z])(seed|s)([-_=]?)\d+$", r"\1\2*", value.rpartition("/")[2])


def experiment_key(run: Run) -> str:
    """A text that is the same for runs that differ only in their seed."""
    return json.dumps([run.model, run.data, run.method, sorted(settings(run).items())], default=str)


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The common name of the runs without the seed, and the differences where groups share a name."""
    firsts, names = [group[0] for group in groups], [_common_name(group) for group in groups]
    if "" in names or len(set(names)) == 1 < len(names):
        names = [""] * len(names)
    labels = []
    for run, name in zip(firsts, names, strict=True):
        sharing = [other for other, its in zip(firsts, names, strict=True) if its == name]
        labels.append(f" {DOT} ".join(filter(None, (name, *_differences(run, sharing)))) or run.name)
    return _numbered(labels)


def tell_apart(runs: Sequence[Run]) -> list[str]:
    """Return the differences between runs of different experiments."""
    return _numbered([f" {DOT} ".join(_differences(run, runs)) for run in runs])


def _numbered(labels: Sequence[str]) -> list[str]:
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: index + 1].count(label)})"
        for index, label in enumerate(labels)
    ]


def _common_name(group: Sequence[Run]) -> str:
    if len(group) == 1:
        return group[0].name
    prefix = os.path.commonprefix([run.name for run in group])  # noqa: RUF071 - letters, not parts of paths
    # The last letter or digit of a name stays: sss, vgg16.
    return re.sub(r"([-_. ]+(seed|s)?|[-_. ]*seed)[-_. =]*\d*$", "", prefix)


def _differences(run: Run, others: Sequence[Run]) -> list[str]:
    """The method and at most three settings in which the experiments differ."""
    mine, all_settings = settings(run), [settings(other) for other in others]
    parts = [
        getattr(run, part)
        for part in ("method", "model", "data")
        if getattr(run, part) and len({getattr(other, part) for other in others}) > 1
    ]
    # Settings of the method first: they are compared most often.
    for key in sorted(mine, key=lambda key: not key.startswith("method.")):
        leaf = key.rsplit(".", 1)[-1]
        if leaf == "name" or len({json.dumps(other.get(key), default=str) for other in all_settings}) == 1:
            continue
        parts.append(f"{leaf} {_written(mine[key])}")
        if len(parts) == 3:
            break
    if not parts:  # only the others have additional settings
        theirs = sorted({key for other in all_settings for key in other} - set(mine))
        parts = [f"no {key.rsplit('.', 1)[-1]}" for key in theirs[:3]]
    return parts


def _written(value: Any) -> str:
    """Small strengths as 1e-4, since 0.0001 and 0.00012 are hard to tell apart."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-2 else scientific(value)
