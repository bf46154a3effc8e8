"""Rows of the paper without a record, with their prices in GPU minutes.

    python benchmarks/missing.py

Compares the rows of the paper's tables, and the runs that are wanted besides, with the records under results/. Writes
results/MISSING.md.
"""

import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "gpu"))

from prices import Price, price

from softprune.lab.config.recipes import load_recipe, recipe_files
from softprune.lab.config.settings import RunConfig
from softprune.lab.report import PaperFigures, paper_table_rows
from softprune.lab.runs.folder import RunFolder
from softprune.lab.sweep import read_sweep

RESULTS = Path(__file__).parents[1] / "results"
SETTINGS = ("train.precision=bf16", "train.channels_last=true")
"""Of all runs, unless one sets another value."""
STARTS = {
    "finetune-cifar10-resnet56-scp": "best-cifar10-resnet56-dense-s0",
    "finetune-cifar10-resnet56-l1": "best-cifar10-resnet56-dense-s0",
    "tinyimagenet-resnet50-fpgm-ft": "tinyimagenet-resnet50-dense-s0",
}
"""Runs of dense networks that recipes with open weights start from."""
SWEEPS = ("paper-table-6", "paper-table-7", "finetune-cifar10-resnet56")
"""Sweeps that vary settings of a recipe."""
STRENGTHS = (("tinyimagenet-resnet50-scp-ft", "4.48e-5"), ("tinyimagenet-resnet50-sss", "0.02"))
"""Strengths to try next: one more secant step towards the paper's cut."""
VARIANTS = {
    "cifar100-vgg16-scp-float32": ("cifar100-vgg16-scp", "train.precision=fp32"),
    "cifar100-vgg16-scp-queue": ("cifar100-vgg16-scp", "data.sampling=queue"),
    "cifar100-densenet40-scp-decay1e-4": ("cifar100-densenet40-scp", "optimizer.weight_decay=1e-4"),
}
"""Runs that might explain a distance to the paper, with their recipe and the setting that differs."""
TRIALS = VARIANTS | {f"{recipe}-strength{value}": (recipe, f"method.strength={value}") for recipe, value in STRENGTHS}
"""Name, recipe and setting of single runs."""


@dataclass(frozen=True)
class Wanted:
    """Runs that belong together, with their goal."""

    title: str
    goal: str
    runs: tuple[tuple[str, tuple[int, ...]], ...]
    """Recipe and seeds."""


QUEUE = (
    Wanted(
        "Accuracy at equal MACs",
        "ResNet-56: 93.9 at 2.13x and 93.65 at 2.57x; VGG-16 on CIFAR-10: 94.0; on CIFAR-100: 74.3; VGG-19: 71.0.",
        (
            ("best-cifar10-resnet56-macs47", (0, 1, 2)),
            ("best-cifar10-resnet56-macs39", (0, 1)),
            ("best-cifar10-vgg16-macs34", (0, 1)),
            ("best-cifar100-vgg16-macs48", (0, 1)),
            ("best-cifar100-vgg19-macs11", (0, 1)),
        ),
    ),
    Wanted(
        "From trained weights, 40 epochs",
        "SCP 0.3 above one-shot L1; what each lever gives.",
        (
            ("best-cifar10-resnet56-dense", (0,)),
            ("finetune-cifar10-resnet56-scp", (0, 1)),
            ("finetune-cifar10-resnet56-l1", (0, 1)),
            ("finetune-cifar10-resnet56-l1-with-distillation", (0, 1)),
            *(
                (f"finetune-cifar10-resnet56-scp-{change}", (0, 1))
                for change in ("without-distillation", "without-cost-weighting", "step-schedule")
            ),
            ("finetune-cifar10-resnet56-scp-macs47", (0,)),
        ),
    ),
    Wanted(
        "Fixed strengths nearer to the paper's cuts",
        "Where the cut is nearer to the paper's, the recipe takes over the strength.",
        tuple((f"{recipe}-strength{value}", (0,)) for recipe, value in STRENGTHS),
    ),
    Wanted(
        "The distance to the paper on CIFAR-100",
        "Is it float32, the authors' way to draw images, or the paper's weight decay, which is half of their code's?",
        tuple((name, (0,)) for name in VARIANTS),
    ),
    Wanted(
        "VGG: Slimming, Variational Pruning, SCP without ReLU",
        "The other rows of tables 1, 2, 3 and 5.",
        (
            *((f"cifar100-{model}-slimming-high-ft", (0,)) for model in ("vgg16", "vgg19")),
            *((f"cifar100-{model}-scp-norelu", (0,)) for model in ("vgg16", "vgg19")),
            *((f"cifar{data}-{model}-slimming-ft", (0,)) for data in (10, 100) for model in ("vgg16", "vgg19")),
            *((f"cifar{data}-vgg16-variational", (0,)) for data in (10, 100)),
        ),
    ),
    Wanted(
        "Tables 4 and 8 on Tiny-ImageNet",
        "The paper's 54% of FLOPs cut; ImageNet itself is the recipes imagenet-resnet50-*.",
        tuple(
            (f"tinyimagenet-resnet50-{row}", (0,))
            for row in ("dense", "scp-ft", "scp-40-ft", "scp-target-ft", "fpgm-ft", "sss", "fpgm", "slimming-ft")
        ),
    ),
    Wanted(
        "DenseNet-40 on CIFAR-100: rows of two tables each",
        "lambda and s are published: cuts within 2.5 points and best accuracy within 0.4 of the paper's.",
        (
            *((f"cifar100-densenet40-scp{end}", (0,)) for end in ("", "-high")),
            ("cifar100-densenet40-scp-strength3e-05", (0, 1)),
        ),
    ),
    Wanted(
        "DenseNet-40: the other rows",
        "Tables 6 and 7, SCP without ReLU, Variational Pruning, Slimming.",
        (
            *((f"cifar100-densenet40-scp-strength{value}", (0,)) for value in ("1e-06", "5e-06")),
            *((f"cifar100-densenet40-scp-{end}", (0, 1)) for end in ("s0", "s1")),
            *((f"cifar100-densenet40-scp-{end}", (0,)) for end in ("s2", "norelu", "relu")),
            *((f"cifar{data}-densenet40-variational", (0,)) for data in (100, 10)),
            *((f"cifar100-densenet40-slimming{end}", (0,)) for end in ("-high-ft", "-ft")),
            ("cifar10-densenet40-slimming-ft", (0,)),
            ("cifar100-densenet40-dense", (0,)),
        ),
    ),
    Wanted(
        "More seeds of the dense networks and of SCP, CIFAR-10",
        "Three seeds of every row of table 1.",
        tuple(
            (f"cifar10-{model}-{kind}", (0, 1, 2))
            for model in ("vgg16", "vgg19", "resnet56")
            for kind in ("dense", "scp")
        ),
    ),
    Wanted(
        "ResNet-164",
        "The last rows of tables 2, 3 and 5.",
        tuple(
            (f"cifar100-resnet164-{row}", (0,))
            for row in ("scp", "scp-high", "scp-norelu", "slimming-ft", "slimming-high-ft", "dense")
        ),
    ),
)
"""Most wanted first: what adds most rows of the paper's tables in a GPU minute. DenseNet-40, which can be resumed,
comes after networks that cannot, and so fills the ends of sessions."""


@dataclass(frozen=True)
class Planned:
    """A run by name: the recipe and the settings that train it."""

    recipe: str
    settings: tuple[str, ...] = ()

    @cached_property
    def config(self) -> RunConfig:
        """Its configuration."""
        return load_recipe(self.recipe, (*SETTINGS, *self.settings))

    @cached_property
    def price(self) -> Price:
        """Its price on one H200."""
        return price(self.config)

    @property
    def start(self) -> str | None:
        """The run whose dense network it starts from, if the recipe leaves the weights open."""
        return STARTS.get(self.recipe)

    @property
    def command(self) -> str:
        """The command, without seed and data."""
        start = () if self.start is None else (f"model.weights=runs/{self.start}",)
        settings = (f"--set {shlex.quote(setting)}" for setting in (*SETTINGS, *self.settings, *start))
        return " ".join(["softprune train", self.recipe, *settings])


@cache
def planned() -> dict[str, Planned]:
    """All recipes, and the runs of the sweeps that vary one setting of a recipe, by name."""
    runs = {name: Planned(name) for name in recipe_files()}
    for cell in (cell for sweep in SWEEPS for cell in read_sweep(sweep).cells):
        # The queue gives the seed, and the weights to start from.
        settings = tuple(each for each in cell.settings if not each.startswith(("seed=", "model.weights=")))
        runs.setdefault(cell.config.name, Planned(cell.recipe, settings))
    return runs | {name: Planned(recipe, (setting, f'name="{name}"')) for name, (recipe, setting) in TRIALS.items()}


def wanted_runs(there: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return (name, seed) of the runs of the queue that have no record, most wanted first."""
    runs = ((name, seed) for wanted in QUEUE for name, seeds in wanted.runs for seed in seeds)
    return [run for run in dict.fromkeys(runs) if run not in there]


def measured(folder: Path = RESULTS) -> set[tuple[str, int]]:
    """Return (name, seed) of every record that was trained as its recipe says."""
    records = [RunFolder(path.parent).read_result() for path in folder.glob("*/result.json")]
    found = set()
    for record in records:
        name = record.name.replace("-without-relu", "-norelu")
        if name in planned() and _same_method(record.config, planned()[name].config):
            found.add((name, record.seed))
            # A fine-tuned run also gives the row before its fine-tuning.
            found.add((name.removesuffix("-ft"), record.seed))
    return found


def _same_method(found: RunConfig, wanted: RunConfig) -> bool:
    ours, theirs = found.method, wanted.method
    same = (ours.name, ours.target) == (theirs.name, theirs.target)
    return same and bool(theirs.target or ours.strength == theirs.strength)


def absent_rows(there: set[tuple[str, int]]) -> list[PaperFigures]:
    """Return the rows of the paper's tables that have no record."""
    names = {name for name, _ in there}
    return [row for row in paper_table_rows() if row.recipe not in names and row.stand_in not in names]


def new_rows(there: set[tuple[str, int]]) -> Counter[str]:
    """Return how many rows of the paper's tables each run would add."""
    return Counter(_command_of(row) for row in absent_rows(there))


def missing_page(there: set[tuple[str, int]]) -> str:
    """The rows of the paper's tables without a record, as Markdown."""
    rows, absent = paper_table_rows(), absent_rows(there)
    lines = [
        "# Rows of the paper without a record",
        "",
        f"{len(rows) - len(absent)} of the {len(rows)} rows of tables 1 to 8 have a record under `results/`. The",
        "others follow with their command and its price in GPU minutes (one H200, alone). A fine-tuned run gives",
        "the row before its fine-tuning, too. A row of ImageNet counts as present if its stand-in on Tiny-ImageNet",
        "is. Written by `python benchmarks/missing.py`.",
    ]
    for table in sorted({row.table for row in absent}):
        own = [row for row in absent if row.table == table]
        lines += ["", f"## Table {table}", "", "| row | minutes | command |", "|---|---:|---|"]
        lines += [_line(row.recipe, _command_of(row)) for row in own]
    return "\n".join(lines) + "\n"


def _command_of(row: PaperFigures) -> str:
    """The recipe to train for a row: with fine-tuning, if there is one, since it gives both rows."""
    stand_in = row.stand_in or row.recipe
    name = stand_in if stand_in in planned() or f"{stand_in}-ft" in planned() else row.recipe
    return f"{name}-ft" if f"{name}-ft" in planned() and not name.endswith("-fpgm") else name


def _line(title: str, name: str, seed: int = 0) -> str:
    run = planned()[name]
    return f"| {title} | {run.price.work / 60:.1f} | `{run.command} --seed {seed} --data-dir data` |"


if __name__ == "__main__":
    (RESULTS / "MISSING.md").write_text(missing_page(measured()), encoding="utf-8")
