"""The tables of docs/scale.md, computed from records.

    python benchmarks/scale_plan.py

Writes them into docs/scale.md, between their marks.
"""

import json
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import input_pipeline
from marks import replace_tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
IMAGES = 1_281_167
"""Training images of ImageNet."""
EPOCHS = 90
GPUS = 8


def _record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "records" / f"{name}.json").read_text(encoding="utf-8"))


def loaders() -> str:
    """Return images per second of the loaders, and how far they differ."""
    record = _record("input_pipeline")
    speeds = {
        (row["case"], row["loader"]): [each["images_per_second"] for each in row["rounds"]] for row in record["rows"]
    }
    ratios = []
    for case in {case for case, _ in speeds}:
        own, others = (
            [rounds for (of, name), rounds in speeds.items() if of == case and name.startswith("softprune") is ours]
            for ours in (True, False)
        )
        for rivals, ours in zip(zip(*others, strict=True), zip(*own, strict=True), strict=True):
            ratios += [speed / max(rivals) for speed in ours]
    spread = max((max(rounds) - min(rounds)) / statistics.median(rounds) for rounds in speeds.values())
    remarks = (
        f"{record['workers']} workers on {record['cores']} cores; the median of {record['rounds']} rounds of "
        f"{record['batches']} batches of {record['batch']} images, after the first batches. The rounds of one loader "
        f"differ by up to {spread:.0%} of their median. Within a round, a loader of softprune delivers "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the images of the fastest other one."
    )
    return f"{input_pipeline.render(record)}\n{textwrap.fill(remarks, 120)}"


def waiting() -> str:
    """Return the share of GPU time that ResNet-50 waits for images, and what decoders deliver."""
    record = _record("gpu_waiting")
    rows, cores = record["rows"], record["environment"]["cores"]
    device = next(row["device"] for row in rows if row["part"] == "device")
    forms = {"resident": "images on the GPU", "folder": "images in folders", "webdataset": "tar shards"}
    steps = [row for row in rows if row["part"] == "waiting" and row["form"] in forms]
    lines = [
        f"| ResNet-50, batch {record['settings']['batch']}, {steps[0]['crop']} x {steps[0]['crop']} | ms a step "
        "| images/s | waiting |",
        "|---|---:|---:|---:|",
    ]
    for row in steps:
        share = f"{row['waiting_percent']:.1f}%" if "waiting_percent" in row else ""
        lines.append(f"| {forms[row['form']]} | {row['ms_per_step']:.2f} | {row['images_per_second']:,} | {share} |")
    decoded = {(row["decoder"], row["files"]): row for row in rows if row["part"] == "decode"}
    sizes = list(dict.fromkeys(files for _, files in decoded))
    lines += ["", "| decoder, images/s | " + " | ".join(f"{size} JPEG" for size in sizes) + " |"]
    lines.append("|---" + "|---:" * len(sizes) + "|")
    for decoder in dict.fromkeys(name for name, _ in decoded):
        cells = (f"{decoded[decoder, size]['images_per_second']:,}" for size in sizes)
        lines.append(f"| {decoder} | " + " | ".join(cells) + " |")
    remarks = (
        f"One {device}, {cores} cores, {cores} loader processes, bfloat16, compiled step, JPEG files of noise with the "
        f"spectrum of photographs; torch {record['environment']['torch']}."
    )
    return "\n".join([*lines, "", textwrap.fill(remarks, 120)])


def imagenet() -> str:
    """Return the plan for ResNet-50 on ImageNet."""
    rows = _record("latency-h200")["rows"]
    forward = next(
        row["dense"]["median_ms"]
        for row in rows
        if (row["model"], row["batch"], row["dtype"], row["backend"], row["fold_bn"])
        == ("resnet50", 256, "bfloat16", "compile+graphs", False)
    )
    loader = next(
        row["cpu_ms_per_image"]
        for row in _record("input_pipeline")["rows"]
        if (row["loader"], row["case"]) == ("softprune shards", "large 224")
    )
    step = 3 * forward
    speed = 256 / step * 1e3
    hours = IMAGES * EPOCHS / (speed * GPUS) / 3600
    cores = speed * loader / 1e3
    return "\n".join(
        [
            "| quantity | value | from |",
            "|---|---:|---|",
            f"| forward pass, batch 256, bfloat16 | {forward:.2f} ms | `benchmarks/records/latency-h200.json` |",
            f"| training step | {step:.1f} ms | three times the forward pass: the backward pass costs two |",
            f"| images/s of one H200 | {speed:,.0f} | 256 / step |",
            f"| images/s of {GPUS} | {speed * GPUS:,.0f} | without communication |",
            f"| {EPOCHS} epochs of {IMAGES:,} images | {hours:.1f} h | images x epochs / speed |",
            f"| GPU hours | {hours * GPUS:.0f} | x {GPUS} |",
            f"| loader, 500 x 375 JPEG to 224 | {loader:.2f} CPU ms | `benchmarks/records/input_pipeline.json` |",
            f"| CPU cores per GPU to keep up | {cores:.0f} | images/s x CPU time of an image |",
        ]
    )


def runs() -> str:
    """Return the plan for 1,000 runs of VGG-16 on CIFAR-10."""
    seconds = statistics.median(
        json.loads(path.read_text(encoding="utf-8"))["wall_seconds"]
        for path in sorted((ROOT / "results").glob("cifar10-vgg16-scp-s*/result.json"))
    )
    lines = ["| GPUs | 1,000 runs | GPU hours |", "|---:|---:|---:|"]
    for gpus in (1, 8, 64):
        hours = 1000 * seconds / gpus / 3600
        lines.append(f"| {gpus} | {hours:,.1f} h | {1000 * seconds / 3600:,.0f} |")
    lines += ["", f"A run takes {seconds:.0f} s: the median of `results/cifar10-vgg16-scp-s*`, 160 epochs on one H200."]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"loaders": loaders, "waiting": waiting, "imagenet": imagenet, "runs": runs}


def with_tables(text: str) -> str:
    """Return ``text`` with the tables where their marks are."""
    return replace_tables(text, lambda name: TABLES[name]())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
