"""Group runs that differ only in their seed, with mean and spread, labels and baselines."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from softprune.config.recipes import config_to_dict, flat_settings
from softprune.report.text import DOT, scientific
from softprune.runs.reading import Run

INCIDENTAL = frozenset(
    {
        "seed",
        "name",
        "data.dir",
        "data.download",
        "data.workers",
        "data.eval_batch_size",
        "train.mode",
        "train.dense_baseline",
    }
)
"""Settings of the place and the repetition of a run, which do not change what was done."""
INCIDENTAL_TABLES = ("records.",)

TRAINING = frozenset({"train.epochs", "train.label_smoothing", "train.ema"})
"""Settings that a dense network must share with a run to be its baseline."""
TRAINING_TABLES = ("model.", "data.", "optimizer.", "schedule.")
_OF_A_SCHEDULE = {"schedule.milestones": ("step",), "schedule.factor": ("step",), "schedule.final": ("cosine",)}


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
    dense = [run for run in runs if run.method == "dense" and not run.in_progress]
    provided = {experiment_key(run) for run in runs if run.dense_top1 is not None}
    return [
        run
        if run.method == "dense" or experiment_key(run) in provided
        else run.model_copy(
            update={"baseline_top1": spread(o.compact_top1 for o in dense if same_training(run, o)).mean}
        )
        for run in runs
    ]


def same_training(run: Run, dense: Run) -> bool:
    """Return whether the dense network was trained as the run, apart from pruning and fine-tuning."""
    return (run.model, run.data) == (dense.model, dense.data) and training(run) == training(dense)


def training(run: Run) -> dict[str, Any]:
    """The settings on which the accuracy of a dense network depends."""
    values = settings(run)
    kind = values.get("schedule.kind")
    unused = {key for key, kinds in _OF_A_SCHEDULE.items() if kind is not None and kind not in kinds}
    return {
        key: value
        for key, value in values.items()
        if (key in TRAINING or key.startswith(TRAINING_TABLES)) and key not in unused
    }


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
    dropped = INCIDENTAL | ({"method.strength"} if targeted else set())  # a target chooses its strength
    tables = (*INCIDENTAL_TABLES, *(["method."] if run.method == "dense" else []))
    return {
        key: _of_any_seed(value, run.seed)
        for key, value in values.items()
        if key not in dropped and not key.startswith(tables)
    }


def _of_any_seed(value: Any, seed: int) -> Any:
    """A run that uses another one (a plan, weights) names the one of its own seed: .../scp-seed0."""
    if not isinstance(value, str):
        return value
    return re.sub(rf"(?<![a-zA-Z])(seed|s)([-_=]?){seed}(?!\d)", r"\1\2*", value)


def experiment_key(run: Run) -> str:
    """A text that is the same for runs that differ only in their seed."""
    return json.dumps([run.model, run.data, run.method, sorted(settings(run).items())], default=str)


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The common name of the runs without the seed, and the differences where groups share a name."""
    firsts = [group[0] for group in groups]
    labels = [_common_name(group) for group in groups]
    if "" in labels or len(set(labels)) == 1 < len(labels):
        labels = [f" {DOT} ".join(_differences(run, firsts)) or run.name for run in firsts]
    else:
        sharing = {label: [run for run, name in zip(firsts, labels, strict=True) if name == label] for label in labels}
        labels = [
            f" {DOT} ".join([label, *_differences(run, sharing[label])])
            for run, label in zip(firsts, labels, strict=True)
        ]
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
    first, last = min(run.name for run in group), max(run.name for run in group)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    prefix = first[:same]
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
