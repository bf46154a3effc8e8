"""The accuracy at a given cost, from our records: the README's first table, docs/sites.md and results/ACCURACY.md.

    python benchmarks/accuracy_table.py

Writes the tables into the documents, between their marks, and the page. The figures of others are from their papers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marks import replace_tables

from softprune.lab.config.recipes import load_recipe
from softprune.lab.report import load_run
from softprune.lab.report.grouping import Spread, spread
from softprune.lab.runs.reading import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "sites.md")
PAGE = RESULTS / "ACCURACY.md"
LATENCY = ROOT / "benchmarks" / "records" / "accuracy_latency.json"


@dataclass(frozen=True)
class Rival:
    """The best figure that we know of at the cost of one of our recipes."""

    recipe: str
    title: str
    cost: str
    """The MACs of the published network."""
    top1: float
    source: str
    goal: float


RIVALS = (
    Rival("best-cifar10-resnet56-macs47", "ResNet-56, CIFAR-10", "2.13x fewer", 93.77, "Torch-Pruning", 93.9),
    Rival("best-cifar10-resnet56-macs39", "ResNet-56, CIFAR-10", "2.57x fewer", 93.64, "Torch-Pruning", 93.65),
    Rival("best-cifar10-vgg16-macs34", "VGG-16, CIFAR-10", "66.6% cut", 94.20, "CORING", 94.0),
    Rival("best-cifar100-vgg16-macs48", "VGG-16, CIFAR-100", "51.5% cut", 73.86, "SCP's paper, best epoch", 74.3),
    Rival("best-cifar100-vgg19-macs11", "VGG-19, CIFAR-100", "8.92x fewer", 70.39, "Torch-Pruning", 71.0),
)
STEPS = (
    ("a fixed strength, the paper's schedule", "cifar100-vgg16-scp-s*"),
    ("a target, the paper's schedule", "budgets-cifar100/macs-0.485-seed*"),
    (
        "a target, from a trained network, cosine schedule, weight decay 5e-4, random erasing, cost weighting 0.5",
        "best-cifar100-vgg16-macs48-without-distillation-s*",
    ),
    ("the same and distillation: the recipe `best-cifar100-vgg16-macs48`", "best-cifar100-vgg16-macs48-s*"),
)
"""What each lever gives, on VGG-16 and CIFAR-100: words, and the records."""
FINETUNED = (
    ("SCP with distillation: the recipe `finetune-cifar10-resnet56-scp`", "finetune-cifar10-resnet56-scp-s[0-9]"),
    ("one-shot L1, then fine-tuning", "finetune-cifar10-resnet56-l1-s[0-9]"),
    ("SCP without distillation", "finetune-cifar10-resnet56-scp-without-distillation-s*"),
    ("one-shot L1, then fine-tuning with distillation", "finetune-cifar10-resnet56-l1-with-distillation-s*"),
    ("SCP with distillation, without cost weighting", "finetune-cifar10-resnet56-scp-without-cost-weighting-s*"),
    ("SCP with distillation, step schedule", "finetune-cifar10-resnet56-scp-step-schedule-s*"),
    (
        "SCP with distillation, 46.95% of the MACs kept (`best-cifar10-resnet56-macs47` in 40 epochs, not 100)",
        "finetune-cifar10-resnet56-scp-macs47-s*",
    ),
)
KINDS = (
    ("ResNet-56, projection shortcuts: default", "site-kinds/site-kinds-resnet56-default-s*"),
    ("the same: sum, linear, stream", "site-kinds/site-kinds-resnet56-all-s*"),
    ("ResNet-56, padded shortcuts: default", "site-kinds/site-kinds-resnet56_a-default-s*"),
    ("the same: sum, linear, stream", "site-kinds/site-kinds-resnet56_a-all-s*"),
    ("MobileNetV2: default", "site-kinds/site-kinds-mobilenetv2-default-s*"),
    ("the same: sum, linear, stream", "site-kinds/site-kinds-mobilenetv2-all-s*"),
)
"""The kinds of sites against each other: benchmarks/site_kinds/sweep.toml."""


def runs_of(pattern: str) -> list[Run]:
    """Return the recorded runs in the folders of ``pattern`` below results/."""
    return [load_run(path.parent) for path in sorted(RESULTS.glob(f"{pattern}/result.json"))]


def table() -> str:
    """The recipes with a record, each beside the best published figure at its cost, in Markdown."""
    lines = [
        "| network | dense | pruned | MACs cut | parameters cut | speed-up | published, at its MACs | epochs "
        "| minutes |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    latency = json.loads(LATENCY.read_text(encoding="utf-8"))["rows"]
    for rival in RIVALS:
        if runs := runs_of(f"{rival.recipe}-s*"):
            cells = [rival.title, _figure(_dense(runs)), _figure(_top1(runs), runs)]
            cells += [f"{_cut(runs, 'macs'):.1f}%", f"{_cut(runs, 'params'):.1f}%"]
            cells += [f"{latency[rival.recipe]['speed_up']:.2f}x"] if rival.recipe in latency else ["-"]
            cells += [f"{rival.top1:.2f} ({rival.source}, {rival.cost})", _epochs(runs[0]), _minutes(runs)]
            lines.append("| " + " | ".join(cells) + " |")
    scp, l1 = (runs_of(pattern) for _, pattern in (FINETUNED[0], FINETUNED[3]))
    cells = ["ResNet-56, CIFAR-10, from trained weights", _figure(_dense(scp)), _figure(_top1(scp), scp)]
    cells += [f"{_cut(scp, 'macs'):.1f}%", f"{_cut(scp, 'params'):.1f}%", "-"]
    cells += [f"{_figure(_top1(l1), l1)} (one-shot L1, fine-tuned as long; ours)", "40", _minutes(scp)]
    lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """The page: goals, what each lever gives, and a target against fixed strengths."""
    lines = [
        "# Accuracy at a given cost",
        "",
        "Top-1 accuracy (%) of the compact network after the last epoch: mean over the seeds, their number in",
        "parentheses, and the sample deviation. Trained in bfloat16 on one H200. Written by",
        "`python benchmarks/accuracy_table.py` from the records in this folder.",
        "",
        "## Goals",
        "",
        "| recipe | MACs cut | pruned | goal | published |",
        "|---|---:|---:|---:|---|",
    ]
    for rival in RIVALS:
        runs = runs_of(f"{rival.recipe}-s*")
        ours = (f"{_cut(runs, 'macs'):.1f}%", _figure(_top1(runs), runs)) if runs else ("-", "no record")
        lines.append(f"| `{rival.recipe}` | {ours[0]} | {ours[1]} | {rival.goal:g} | {rival.top1:g}, {rival.source} |")
    lines += [
        "",
        "Seed 0 trains its own dense network for 200 epochs; further seeds start from the same dense network, as they",
        "would from a downloaded one. Each seed of a recipe was trained once, with settings fixed beforehand.",
        "",
        "## From trained weights, 40 epochs",
        "",
        "A ResNet-56 that was trained for 200 epochs, 50% of the MACs removed in 40 epochs: the sweep",
        "`finetune-cifar10-resnet56`. The teacher is the network that each run starts from, which is kept: `--set",
        "model.weights=results/best-cifar10-resnet56-dense-s0/dense.safetensors`.",
        "",
        "| training | MACs cut | dense | pruned |",
        "|---|---:|---:|---:|",
        *(_row(words, runs) for words, pattern in FINETUNED if (runs := runs_of(pattern))),
        "",
        f"SCP with distillation against one-shot L1 and fine-tuning: {_difference(0, 1):+.2f}; the goal is +0.3. With",
        f"the same teacher for both: {_difference(0, 3):+.2f}. Without a teacher for both: {_difference(2, 1):+.2f}.",
        "",
        "## What each lever gives: VGG-16, CIFAR-100",
        "",
        "| training | MACs cut | dense | pruned |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        *(_row(words, runs_of(pattern)) for words, pattern in STEPS),
        "",
        "## A target against fixed strengths",
        "",
        "VGG-16 on CIFAR-100 with the paper's schedule of 160 epochs.",
        "",
        "| sparsity | seed | MACs cut | pruned |",
        "|---|---:|---:|---:|",
    ]
    fixed = [*runs_of("cifar100-vgg16-scp-s*"), *runs_of("cifar100-vgg16-scp-strength1e-04-s*")]
    aimed = runs_of("budgets-cifar100/macs-0.485-seed*")
    for run in (*fixed, *aimed):
        method = run.config.method
        words = f"target macs = {method.target['macs']}" if method.target else f"strength {method.strength:g}"
        lines.append(f"| {words} | {run.seed} | {_cut([run], 'macs'):.1f}% | {run.compact_top1:.2f} |")
    between = interpolated(fixed, _cut(aimed, "macs"))
    lines += [
        "",
        f"Fixed strengths, interpolated to the target's cut: {between:.2f}. With the target: "
        f"{_top1(aimed).mean:.2f}, {(_top1(aimed).mean or 0) - between:+.2f}.",
    ]
    return "\n".join(lines) + "\n"


def _row(words: str, runs: Sequence[Run]) -> str:
    return f"| {words} | {_cut(runs, 'macs'):.1f}% | {_figure(_dense(runs))} | {_figure(_top1(runs), runs)} |"


def _difference(ours: int, other: int) -> float:
    """The difference of two rows of FINETUNED."""
    first, second = (_top1(runs_of(FINETUNED[row][1])).mean or 0.0 for row in (ours, other))
    return first - second


def interpolated(runs: Sequence[Run], cut: float) -> float:
    """Return the accuracy at ``cut`` on the line between the strengths around it, each the mean over its seeds."""
    by_strength: dict[float, list[Run]] = {}
    for run in runs:
        by_strength.setdefault(run.config.method.strength, []).append(run)
    points = sorted((_cut(group, "macs"), _top1(group).mean or 0.0) for group in by_strength.values())
    below = max((point for point in points if point[0] <= cut), default=points[0])
    above = min((point for point in points if point[0] >= cut), default=points[-1])
    if above[0] == below[0]:
        return below[1]
    return below[1] + (above[1] - below[1]) * (cut - below[0]) / (above[0] - below[0])


def with_table(text: str) -> str:
    """`text` with each table where its marks are."""
    tables = {"accuracy": table, "site-kinds": kinds_table}
    return replace_tables(text, lambda name: tables[name]() if name in tables else None)


def kinds_table() -> str:
    """The kinds of sites against each other, in Markdown."""
    lines = ["| kinds of sites | MACs cut | parameters cut | pruned |", "|---|---:|---:|---:|"]
    for words, pattern in KINDS:
        if runs := runs_of(pattern):
            cuts = " | ".join(f"{_cut(runs, measure):.1f}%" for measure in ("macs", "params"))
            lines.append(f"| {words} | {cuts} | {_figure(_top1(runs), runs)} |")
    return "\n".join(lines)


def _top1(runs: Sequence[Run]) -> Spread:
    return spread(run.compact_top1 for run in runs)


def _dense(runs: Sequence[Run]) -> Spread:
    own = spread(run.dense_top1 for run in runs)
    if own.n:
        return own
    beside = runs_of(f"{runs[0].data}-{runs[0].model}-dense-s*")
    return spread(run.last.top1 for run in beside if run.last)


def _cut(runs: Sequence[Run], measure: str) -> float:
    shares = [getattr(run.compact, measure) / getattr(run.dense, measure) for run in runs]
    return 100 - 100 * sum(shares) / len(shares)


def _figure(values: Spread, runs: Sequence[Run] = ()) -> str:
    if values.mean is None:
        return "-"
    deviation = f" ± {values.deviation:.2f}" if values.deviation and runs else ""
    return f"{values.mean:.2f}{deviation}" + (f" ({len(runs)})" if runs else "")


def _epochs(run: Run) -> str:
    """The epochs of the dense network, which another seed may have trained, and of pruning."""
    train = load_recipe(run.name).train
    return f"{train.dense_epochs or train.epochs} + {train.epochs}"


def _minutes(runs: Sequence[Run]) -> str:
    """The time of pruning, without the dense network's."""
    return f"{sum(run.wall_seconds or 0 for run in runs) / len(runs) / 60:.1f}"


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(with_table(document.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
