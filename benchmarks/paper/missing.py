"""The rows of the paper's tables without a record: what is left, its price, and why.

    python benchmarks/paper/missing.py

A price is minutes of one H200 with nothing beside it. A fine-tuned run gives the row before its fine-tuning, too. A
row of ImageNet counts as present if its stand-in on Tiny-ImageNet is.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tables import markdown, measured, paper_rows, runs

PRICES = {
    "cifar10-densenet40-slimming-ft": (11.7, "not trained: GPU time"),
    "cifar10-densenet40-variational": (6.6, "waits until Variational Pruning removes channels of VGG-16"),
    "cifar100-densenet40-slimming-ft": (12.1, "not trained: GPU time"),
    "cifar100-densenet40-slimming-high-ft": (11.7, "not trained: GPU time"),
    "cifar100-densenet40-variational": (6.6, "waits until Variational Pruning removes channels of VGG-16"),
    "cifar100-densenet40-scp-norelu": (6.6, "stopped after 54 of 160 epochs; its checkpoint is lost"),
    "cifar100-densenet40-scp-s2": (6.6, "stopped after 107 of 160 epochs; its checkpoint is lost"),
    "cifar100-resnet164-slimming-ft": (30.4, "not trained: dearest network, last in the queue"),
    "cifar100-resnet164-slimming-high-ft": (29.6, "not trained: dearest network, last in the queue"),
    "cifar100-resnet164-scp": (16.6, "not trained: dearest network, last in the queue"),
    "cifar100-resnet164-scp-high": (16.6, "not trained: dearest network, last in the queue"),
    "cifar100-resnet164-scp-norelu": (16.6, "not trained: dearest network, last in the queue"),
}
"""Minutes and the reason for each run that a row without a record needs."""
WANTED = {
    "cifar100-densenet40-dense": (6.6, "DenseNet-40 on CIFAR-100 has no drop without it; stopped once, and lost"),
    "cifar100-resnet164-dense": (16.6, "rows of ResNet-164 will have no drop without it"),
    "cifar10-resnet56_a-dense": (5.9, "rows of SFP and FPGM have no drop without it"),
    "cifar100-densenet40-scp-s1, seed 1": (6.6, "table 7: with seeds half a point apart one run shows no effect of s"),
    "cifar10-resnet164-scp": (16.6, "figure 4 of the paper has ResNet-164"),
    "tinyimagenet-resnet50-dense": (5.8, "tables 4 and 8: longer, until it no longer underfits"),
    "tinyimagenet-resnet50-scp-target-ft": (5.8, "table 8: at a strength at which channels die over epochs"),
    "cifar100-vgg16-scp-norelu, cifar100-vgg19-scp-norelu": (6.0, "table 5: at a fixed strength, like the rows beside"),
}
"""Runs that add no row, but make one complete."""


def missing() -> list[tuple[int, str, str]]:
    """Return table, recipe and the run to train of each row without a record."""
    records = runs()
    absent = [row for row in paper_rows() if measured(row, records) is None]
    return [(row.table, row.recipe, row.recipe if row.recipe in PRICES else f"{row.recipe}-ft") for row in absent]


def missing_table() -> str:
    """Return the rows without a record."""
    rows = [[str(table), row, PRICES[run][1], f"{PRICES[run][0]:.1f}"] for table, row, run in missing()]
    return markdown(["table", "row", "why", "minutes"], rows, left=3)


def wanted_table() -> str:
    """Return the runs that complete rows."""
    rows = [[name, why, f"{price:.1f}"] for name, (price, why) in WANTED.items()]
    return markdown(["run", "why", "minutes"], rows, left=2)


def summary() -> str:
    """Return how much is there, and what the rest costs."""
    absent, count = missing(), len(paper_rows())
    to_train = {run for _, _, run in absent}
    minutes = sum(PRICES[run][0] for run in to_train)
    return (
        f"{count - len(absent)} of the {count} rows of tables 1 to 8 have a record. The other {len(absent)} need "
        f"{len(to_train)} runs, {minutes:.0f} minutes of one H200."
    )


if __name__ == "__main__":
    print(summary(), "", missing_table(), "", "Besides:", "", wanted_table(), sep="\n")
