"""Latency of the networks of the README's first table, on this machine.

    python benchmarks/accuracy_latency.py

Cuts a new network of each recipe to the channels that its record kept, and times it against the dense one: weights do
not matter for latency. Writes benchmarks/records/accuracy_latency.json. Needs an idle machine.
"""

import json
import platform

import torch
from accuracy_table import LATENCY, RIVALS, runs_of

import softprune as sp
from softprune.bench import compare_latency
from softprune.models.registry import build
from softprune.runs.reading import Run

BATCH = 64


def shapes(run: Run) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """Return the dense network, one of the compact network's shape, and an example."""
    classes = 100 if run.data == "cifar100" else 10
    dense, example = build(run.model, classes), torch.zeros(2, 3, 32, 32)
    masked = build(run.model, classes)
    with torch.no_grad():
        for site in run.sites:
            bn = masked.get_submodule(site.name)
            keep = torch.tensor(site.keep)
            bn.weight.copy_(keep.float())
            bn.bias.copy_(keep.float() - 1)
    return dense, sp.SoftPruner(masked, example).compact(), example


def main() -> None:
    rows = {}
    for rival in RIVALS:
        run = runs_of(f"{rival.recipe}-s0")[0]
        dense, compact, example = shapes(run)
        assert sp.cost(compact, example[:1]).macs <= 1.001 * run.compact.macs
        report = compare_latency(dense, compact, example, batches=[BATCH], threads=1)
        print(rival.recipe, report, sep="\n", flush=True)
        (row,) = report.rows
        assert row.dense is not None
        assert row.compact is not None
        rows[rival.recipe] = {"speed_up": row.speed_up, "dense_ms": row.dense.median, "compact_ms": row.compact.median}
    LATENCY.write_text(
        json.dumps(
            {
                "command": "python benchmarks/accuracy_latency.py",
                "batch": BATCH,
                "threads": 1,
                "precision": "float32",
                "device": f"CPU, {platform.machine()}",
                "torch": torch.__version__,
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
