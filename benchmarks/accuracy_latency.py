"""Latency of the networks of the README's first table, on this machine.

    python benchmarks/accuracy_latency.py

Cuts a new network of each recipe to the channels that its record kept, and times it against the dense one: weights do
not matter for latency. Writes benchmarks/records/accuracy_latency.json. Needs an idle machine.
"""

import json
import platform

import torch
from accuracy_table import LATENCY, RIVALS, runs_of

from softprune.bench import compare_latency
from softprune.lab.cli.opened import open_compact

BATCH = 64


def main() -> None:
    rows = {}
    for rival in RIVALS:
        run = open_compact(runs_of(f"{rival.recipe}-s0")[0].path, by_record=True)
        report = compare_latency(run.dense, run.compact, run.example, batches=[BATCH], threads=1)
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
