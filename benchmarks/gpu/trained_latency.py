"""Latency of the networks of trained runs, dense against compact, alone on this machine.

    python benchmarks/gpu/trained_latency.py OUT RUN ...

Like `softprune bench RUN --backend eager,graph --batch 64` in one process, in float32 and in bfloat16 with
channels_last, as the run was cut and in multiples of eight channels. Writes OUT/NAME.json for each run; copy it to
results/NAME/bench.json, which `softprune compare` reads. Weights do not matter, so that a run's config.toml and
result.json are enough.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from softprune.bench import compare_latency
from softprune.lab.cli.deploy import bench_record
from softprune.lab.cli.opened import open_compact

BATCH = 64
"""As in the paper's section on inference time."""
ROUND_TO = (0, 8)
"""As the run was cut, and in multiples of eight channels, which tensor cores process at a time in half precision."""
DTYPES = ("float32", "bfloat16")


def main(arguments: list[str]) -> None:
    """Measure the runs."""
    out, *runs = map(Path, arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        record, rows = dict[str, Any](), []
        for round_to in ROUND_TO:
            opened = open_compact(run, by_record=True, round_to=round_to)
            for dtype in DTYPES if device.type == "cuda" else DTYPES[:1]:
                report = compare_latency(
                    opened.dense,
                    opened.compact,
                    opened.example,
                    backends=["eager", "graph"],
                    batches=BATCH,
                    device=device,
                    dtype=dtype,
                    channels_last=dtype == "bfloat16",
                )
                print(run.name, f"round_to={round_to}", report, sep="\n", flush=True)
                record = bench_record(report, run, device, round_to)
                rows += record["rows"]
        text = json.dumps(record | {"rows": rows}, indent=1) + "\n"
        (out / f"{run.name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
