"""Render docs/speed.md from benchmarks/records/step_time.json.

python benchmarks/speed_page.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "step_time.json"
PAGE = ROOT / "docs" / "speed.md"
Rows = list[dict[str, Any]]


def page(record: dict[str, Any]) -> str:
    """The page as Markdown."""
    environment = record["environment"]
    return f"""# Training speed

Rendered from `benchmarks/records/step_time.json` by `python benchmarks/speed_page.py`; measured by
`benchmarks/step_time.py` on {record["date"]}: {environment["device"]}, torch {environment["torch"]}, batch
{record["settings"]["batch"]}, bfloat16 autocast, synthetic images of CIFAR's shape, median of timed blocks.

*plain*: a PyTorch loop with a DataLoader of 8 workers, eager, with masks written straight from the paper's formulas.
*eager*: softprune's step without compilation. *fast*: what `softprune train` does on a GPU by default: compiled, and
the whole step (batch, augmentation, noise, loss, backward, optimizer) one CUDA graph.

{_overview(record["rows"])}

## Every measurement

Rows marked "beside others" compiled while other processes did, and were then timed alone. Separate processes choose
different convolution algorithms (cuDNN's search), which moves a step by about as much as masks cost: compare the
repeated rows of one network before reading anything into a difference of a few percent.

{_all(record["rows"])}
"""


def _fastest(rows: Rows, model: str, variant: str, masks: bool) -> float:
    return min(
        row["ms_per_step"]
        for row in rows
        if (row["model"], row["variant"], row["masks"]) == (model, variant, masks)
    )


def _overview(rows: Rows) -> str:
    lines = [
        "| network | plain, masks | eager, masks | fast, no masks | fast, masks | masks cost | over plain | "
        "start-up s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        plain, eager = (_fastest(rows, model, variant, True) for variant in ("plain", "eager"))
        bare, masked = (_fastest(rows, model, "fast", masks) for masks in (False, True))
        started = min(
            row["startup_seconds"]
            for row in rows
            if (row["model"], row["variant"], row["masks"]) == (model, "fast", True)
        )
        lines.append(
            f"| {model} | {plain:.2f} | {eager:.2f} | {bare:.2f} | {masked:.2f} | {100 * (masked / bare - 1):+.1f}% | "
            f"{plain / masked:.0f}x | {started:.0f} |"
        )
    return "\n".join(lines) + "\n\nMilliseconds per step, the fastest of the measurements of each kind below."


def _all(rows: Rows) -> str:
    lines = [
        "| network | variant | masks | ms (least to most) | steps | start-up s | call |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["variant"], row["masks"], row["call"])):
        beside = " beside others" if row["started_beside_others"] else ""
        lines.append(
            f"| {row['model']} | {row['variant']} | {'yes' if row['masks'] else 'no'} | {row['ms_per_step']:.3f} "
            f"({row['ms_least']:.3f} to {row['ms_most']:.3f}) | {row['timed_steps']} | "
            f"{row['startup_seconds']:.0f}{beside} | {row['call']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
