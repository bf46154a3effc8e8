"""Render benchmarks/records/speed.md from benchmarks/records/step_time.json.

python benchmarks/speed_page.py
"""

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "step_time.json"
TEACHER = ROOT / "benchmarks" / "records" / "teacher_time.json"
BUDGET = ROOT / "benchmarks" / "records" / "budget-time.json"
TURNS = ROOT / "benchmarks" / "records" / "step_turns.json"
PAGE = ROOT / "benchmarks" / "records" / "speed.md"
Rows = list[dict[str, Any]]
GOAL = 8
"""Times the plain loop."""


def page(record: dict[str, Any]) -> str:
    """The page as Markdown."""
    environment = record["environment"]
    return f"""# Training speed

Rendered from `benchmarks/records/step_time.json` by `python benchmarks/speed_page.py`; measured by
`benchmarks/step_time.py` on {record["date"]}: {environment["device"]}, torch {environment["torch"]}, batch
{record["settings"]["batch"]}, bfloat16 autocast, synthetic images of CIFAR's shape.

*plain*: a PyTorch loop with a DataLoader of 8 workers, eager, with masks written straight from the paper's formulas.
*eager*: softprune's step without compilation. *fast*: what `softprune train` does on a GPU: compiled, and the whole
step (batch, augmentation, noise, loss, backward, optimizer) one CUDA graph; here with `train.precision = "bf16"` and
`train.channels_last = true`. Plain and eager steps were measured in call 3, two of them again in call 8; fast ones
whenever they changed.

{_overview(record["rows"])}

Fast steps are timed with and without masks in turns in one process (since call 5), because separate processes get
different convolution algorithms from cuDNN's search, which moves a step by more than masks cost. What made them faster
since: small kernels go side by side into one launch (call 6); convolutions of odd widths are widened by zeros
(DenseNet-40 in call 7, the colours of every network's images in call 8); convolutions with very few outputs,
DenseNet-40's, are matrix products (call 8), whose gradients are copied eight bytes at a time, and BatchNorms of
concatenations, DenseNet-40's again, take the statistics of every channel once (call 9). Of call 8 the start-up is not
shown: its processes compiled at low priority beside trainings, which slowed them down. DenseNet-40's start-up is that
of call 6, before its convolutions became products, which take longer to compile.

Call 10 repeats three networks with later code, in the seconds after trainings. All three take longer than in calls 8
and 9, with masks and without. So did the old and the new code alike in the table of two commits below, where the later
blocks of every row take longer than its first. The clock of a GPU that was busy before is the likely cause.

{_goal(record["rows"])}

## Distillation and budgets

{_additions(json.loads(TEACHER.read_text()), json.loads(BUDGET.read_text()))}

## Before and after the new layout

{_turns(json.loads(TURNS.read_text()))}

## Every measurement

Rows marked "beside others" compiled while other processes did; the timing itself ran alone but for compilers (a
median far above the least block was disturbed by one).

{_all(record["rows"])}
"""


def _additions(teacher: dict[str, Any], budget: dict[str, Any]) -> str:
    """What a teacher adds to a step and the updates of a budget to a training, as sentences."""
    alone, taught = (
        next(row for row in teacher["rows"] if row["teacher"] is with_teacher)["ms_per_step"]
        for with_teacher in (False, True)
    )
    text = (
        f"A fast step of ResNet-56 with masks, batch {teacher['settings']['batch']}, takes {alone:.2f} ms, and "
        f"{taught:.2f} ms with a ResNet-56 as teacher: {100 * (taught / alone - 1):+.0f}% "
        "(`step_time.py --teacher`, `teacher_time.json`). "
        f"The {budget['updates']} updates of its budget take {budget['share_percent']:.2f}% of a training of "
        f"{budget['training_seconds']:.0f} s (`budget_time.py`, `budget-time.json`, on the same machine's CPU)."
    )
    return textwrap.fill(text, 120)


def _turns(record: dict[str, Any]) -> str:
    """Two revisions that were timed in turns, as a table."""
    old, new = record["revisions"]
    lines = [
        f"Fast steps with masks, batch 64, of commits {record['revisions'][old][:7]} and "
        f"{record['revisions'][new][:7]}, timed in turns",
        "(`gpu/turns.py`, `step_turns.json`): milliseconds in each of two processes, which may use different",
        "convolution algorithms.",
        "",
        "| network | before | after | means |",
        "|---|---|---|---:|",
    ]
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        times = [
            [row["ms_per_step"] for row in record["rows"] if (row["model"], row["revision"]) == (model, revision)]
            for revision in (old, new)
        ]
        change = 100 * (sum(times[1]) * len(times[0]) / (sum(times[0]) * len(times[1])) - 1)
        cells = (", ".join(f"{value:.2f}" for value in each) for each in times)
        lines.append(f"| {model} | {' | '.join(cells)} | {change:+.1f}% |")
    return "\n".join(lines)


def _pick(rows: Rows, model: str, variant: str, masks: bool) -> dict[str, Any]:
    """The newest measurement of a kind."""
    found = [row for row in rows if (row["model"], row["variant"], row["masks"]) == (model, variant, masks)]
    return max(found, key=lambda row: row["call"])


def _overview(rows: Rows) -> str:
    lines = [
        "| network | plain, no masks | fast, no masks | faster | plain, masks | eager, masks | fast, masks | faster | "
        "masks cost | start-up s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        plain, eager = (_pick(rows, model, variant, True)["ms_per_step"] for variant in ("plain", "eager"))
        unmasked = _pick(rows, model, "plain", False)["ms_per_step"]
        bare, masked = (_pick(rows, model, "fast", masks)["ms_per_step"] for masks in (False, True))
        cold = _pick(
            [row for row in rows if not (row.get("warm_cache") or row.get("crowded_start"))], model, "fast", True
        )
        lines.append(
            f"| {model} | {unmasked:.2f} | {bare:.2f} | {unmasked / bare:.1f}x | {plain:.2f} | {eager:.2f} | "
            f"{masked:.2f} | {plain / masked:.1f}x | {100 * (masked / bare - 1):+.1f}% | "
            f"{cold['startup_seconds']:.0f} |"
        )
    return (
        "\n".join(lines)
        + "\n\nMilliseconds per step, the median over timed blocks in the newest call that has the kind. Start-up is"
        "\nwith masks and an empty compiler's cache, in the newest call that had one."
    )


def _goal(rows: Rows) -> str:
    """Which networks are eight times as fast as the plain loop, against the newest of it and the fastest."""
    missed, close = [], []
    for model in dict.fromkeys(row["model"] for row in rows):
        for masks in (True, False):
            kind = f"{model} {'with' if masks else 'without'} masks"
            fast = _pick(rows, model, "fast", masks)["ms_per_step"]
            plain = [row for row in rows if (row["model"], row["variant"], row["masks"]) == (model, "plain", masks)]
            newest, fastest = _pick(plain, model, "plain", masks), min(row["ms_per_step"] for row in plain)
            if newest["ms_per_step"] < GOAL * fast:
                missed.append(kind)
            elif fastest < GOAL * fast:
                close.append(f"{kind} ({fastest / fast:.1f} times)")
    met = f"missed by {', '.join(missed)}" if missed else "met by all networks, with masks and without"
    less = f" Against the fastest plain loop measured, not the newest, less: {', '.join(close)}." if close else ""
    return textwrap.fill(f"The goal was {GOAL} times the plain loop: {met}.{less}", 120)


def _all(rows: Rows) -> str:
    lines = [
        "| network | variant | masks | ms (least to most) | steps | start-up s | call | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["variant"], row["masks"], row["call"])):
        beside = " beside others" if row["started_beside_others"] else ""
        beside += " (cached)" if row.get("warm_cache") else ""
        beside += " and trainings" if row.get("crowded_start") else ""
        lines.append(
            f"| {row['model']} | {row['variant']} | {'yes' if row['masks'] else 'no'} | {row['ms_per_step']:.3f} "
            f"({row['ms_least']:.3f} to {row['ms_most']:.3f}) | {row['timed_steps']} | "
            f"{row['startup_seconds']:.0f}{beside} | {row['call']} | {row['note']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
