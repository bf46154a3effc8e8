"""Run folders as `softprune train` writes them, with made-up but plausible numbers, for the report's tests.

Three networks: VGG-16 (13 sites, 4,224 channels), ResNet-164 (163 sites, 12,112 channels), a digits net.
`python tests/lab/report/synthetic_runs.py OUT` writes them and their reports, to be looked at.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

DELTA, C = 0.05, 0.95
Z = NormalDist().inv_cdf(C)
Conv = tuple[str, str | None, str | None, int, int, int, int]  # name, site read, site fed, in, out, kernel, pixels


def vgg16_layout() -> tuple[list[tuple[str, int]], list[Conv]]:
    sites: list[tuple[str, int]] = []
    convs: list[Conv] = []
    pixels, last, before, index = 32, None, 3, 0
    for item in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512):
        if item == 0:
            pixels, index = pixels // 2, index + 1
            continue
        site = f"features.{index + 1}"
        sites.append((site, item))
        convs.append((f"features.{index}", last, site, before, item, 3, pixels * pixels))
        last, before, index = site, item, index + 3
    convs.append(("classifier", last, None, 512, 10, 1, 1))
    return sites, convs


def resnet164_layout() -> tuple[list[tuple[str, int]], list[Conv]]:
    sites: list[tuple[str, int]] = []
    convs: list[Conv] = [("stem", None, None, 3, 16, 3, 1024)]
    stream = 16
    for stage, planes in enumerate((16, 32, 64)):
        pixels = (32 >> stage) ** 2
        for block in range(18):
            name = f"stages.{stage}.{block}"
            sites += [(f"{name}.bn1", stream), (f"{name}.bn2", planes), (f"{name}.bn3", planes)]
            convs.append((f"{name}.conv1", f"{name}.bn1", f"{name}.bn2", stream, planes, 1, pixels))
            convs.append((f"{name}.conv2", f"{name}.bn2", f"{name}.bn3", planes, planes, 3, pixels))
            convs.append((f"{name}.conv3", f"{name}.bn3", None, planes, planes * 4, 1, pixels))
            if block == 0:
                convs.append((f"{name}.project", None, None, stream, planes * 4, 1, pixels))
            stream = planes * 4
    sites.append(("bn", stream))
    convs.append(("classifier", "bn", None, stream, 100, 1, 1))
    return sites, convs


def digits_layout() -> tuple[list[tuple[str, int]], list[Conv]]:
    sites, convs, before, last = [], [], 1, None
    for index, (width, pixels) in enumerate(((16, 64), (16, 64), (32, 16), (32, 16), (64, 4), (64, 4))):
        name = f"features.{index}"
        sites.append((f"{name}.bn", width))
        convs.append((f"{name}.conv", last, f"{name}.bn", before, width, 3, pixels))
        before, last = width, f"{name}.bn"
    convs.append(("classifier", last, None, 64, 10, 1, 1))
    return sites, convs


def channels(width: int, ratio: float, rng: random.Random) -> dict[str, Any]:
    """Shifts and scales of one layer: dying channels drift down while their scale shrinks."""
    beta, gamma = [], []
    for _ in range(width):
        if rng.random() < ratio:
            drift = rng.betavariate(1.4, 2.5)
            beta.append(-0.12 - 1.1 * drift + rng.gauss(0, 0.03))
            gamma.append(abs(rng.gauss(0.015 + 0.14 * drift * rng.random(), 0.02)))
        else:
            beta.append(rng.gauss(-0.08, 0.16))
            gamma.append(abs(rng.gauss(0.32, 0.12)) + 0.01)
    beta, gamma = [round(b, 6) for b in beta], [round(g, 6) * rng.choice((1, 1, 1, -1)) for g in gamma]
    keep = [not b + Z * abs(g) < DELTA for b, g in zip(beta, gamma, strict=True)]
    return {"width": width, "kept": sum(keep), "keep": keep}


def make(
    folder: Path, network: str = "vgg16", *, seed: int = 0, epochs: int = 160, level: float = 1.0, method: str = "scp"
) -> dict[str, Any]:
    """Write one finished run and give its record; ``level`` scales how much is pruned (0: a dense run)."""
    layout, data, top = {
        "vgg16": (vgg16_layout, "cifar10", 93.85),
        "resnet164": (resnet164_layout, "cifar100", 76.9),
        "digits_net": (digits_layout, "digits", 98.9),
    }[network]
    rng = random.Random(f"{network}-{seed}-{level}")
    names, convs = layout()
    sites = []
    for position, (name, width) in enumerate(names):
        depth = position / len(names)
        ratio = level * (0.15 + 0.8 * depth**1.5) * (0.55 if network == "resnet164" else 1.0)
        row = channels(width, min(ratio + rng.uniform(-0.06, 0.06), 0.97) if level else 0.0, rng)
        if not level:
            row |= {"keep": [True] * width, "kept": width}
        sites.append({"name": name, "activation": "relu", **row})
    kept = {row["name"]: row["kept"] for row in sites}
    modules = [_module(conv, kept) for conv in convs]
    norm = sum(width for _, width in names)
    dense = _totals(modules, "dense", norm, network)
    compact = _totals(modules, "compact", sum(kept.values()), network)
    rows = _curve(epochs, dense, compact, top - 0.1 - 0.5 * (level > 1), rng)
    best = max(rows, key=lambda row: row["test_top1"])
    moments = [_moment(best), _moment(rows[-1])]
    record = {
        "format": 2,
        "name": f"{network}-{method}-seed{seed}",
        "command": f"softprune train recipes/{data}/{network}.toml --set seed={seed}",
        "config": {
            "name": "",
            "seed": seed,
            "model": {"name": network, "weights": ""},
            "data": {"name": data, "dir": f"/data/{seed}", "batch_size": 64},
            "method": {"name": method, "strength": 1e-4 * level},
            "train": {"epochs": epochs, "dense_baseline": method != "dense", "mode": "auto", "precision": "bf16"},
            "optimizer": {"lr": 0.1, "weight_decay": 2e-4},
            "schedule": {"kind": "step", "milestones": [80, 121]},
        },
        "environment": {
            "python": "3.12.3",
            "numpy": "2.4.0",
            "cuda": "13.0",
            "cudnn": 91300,
            "processes": 1,
            "threads": 8,
            "torch": "2.11.0+cu130",
            "softprune": "0.1.0",
            "device": "NVIDIA H200",
            "platform": "Linux-6.8-x86_64",
            "git": {"commit": "0123abc", "changed": False},
        },
        "seed": seed,
        "started": "2025-01-04T10:02:11Z",
        "finished": "2025-01-04T10:09:02Z",
        "wall_seconds": 411.3,
        "images_per_second": 21900.0,
        "dense": dense,
        "compact": compact,
        "best": moments[0],
        "last": moments[1],
        "table": [
            _variant("dense", top, dense, 1.0),
            _variant("masked", rows[-1]["test_top1"], dense, 1.02),
            _variant("compact", rows[-1]["test_top1"], compact, 0.15 + 0.85 * compact["macs"] / dense["macs"]),
        ],
        "sites": sites,
        "modules": modules,
        "method": method,
        "model": network,
        "data": data,
        "epochs": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return record


def _module(conv: Conv, kept: dict[str, int]) -> dict[str, Any]:
    name, reads, feeds, inputs, outputs, kernel, pixels = conv
    left_in = kept[reads] if reads else inputs
    left_out = kept[feeds] if feeds else outputs
    linear = name == "classifier"
    return {
        "name": name,
        "kind": "Linear" if linear else "Conv2d",
        "macs_dense": inputs * outputs * kernel**2 * pixels,
        "macs_compact": left_in * left_out * kernel**2 * pixels,
        "out_dense": outputs,
        "out_compact": left_out,
        "params_dense": inputs * outputs * kernel**2 + outputs * linear,
        "params_compact": left_in * left_out * kernel**2 + left_out * linear,
    }


def _totals(modules: list[dict[str, Any]], which: str, norm: int, network: str) -> dict[str, Any]:
    macs = sum(row[f"macs_{which}"] for row in modules)
    params = sum(row[f"params_{which}"] for row in modules) + 2 * norm
    paper = {"paper_flops": 2 * macs + 12345, "paper_params": params, "paper_channels": norm}
    return {"macs": macs, "params": params, "channels": norm, **(paper if network != "digits_net" else {})}


def _curve(epochs: int, dense: dict[str, Any], compact: dict[str, Any], top: float, rng: random.Random) -> list[Any]:
    rows, step = [], 782
    for epoch in range(epochs):
        time = epoch / epochs
        stage = 0 if time < 0.5 else 1 if time < 0.756 else 2
        test = min(top, (top - (9.0, 0.9, 0.0)[stage]) * (1 - math.exp(-(epoch + 1.5) / (0.05 * epochs + 0.7))))
        test += rng.gauss(0, (1.6, 0.25, 0.07)[stage])
        progress = 1 - math.exp(-5.5 * max(time - 0.02, 0) * epochs / (epochs - 0.99))
        progress = min(1.0, progress / (1 - math.exp(-5.5 * 0.97)))
        share = {key: dense[key] + (compact[key] - dense[key]) * progress for key in ("macs", "params", "channels")}
        if epoch == epochs - 1:
            share = {key: compact[key] for key in share}
        paper = {}
        if "paper_flops" in dense:
            flops = dense["paper_flops"] + (compact["paper_flops"] - dense["paper_flops"]) * progress
            paper = {
                "paper_flops": round(flops),
                "paper_params": round(share["params"]),
                "paper_channels": round(share["channels"]),
            }
        rows.append(
            {
                "epoch": epoch,
                "step": (epoch + 1) * step,
                "lr": (0.1, 0.01, 0.001)[stage],
                "strength": 1e-4,
                "train_loss": round(2.0 * math.exp(-3 * time) + 0.01, 4),
                "train_top1": round(min(99.98, test + 3 + 3.2 * time), 2),
                "test_loss": round(1.6 * math.exp(-2 * time) + 0.2, 4),
                "test_top1": round(min(test, 99.7), 2),
                "test_top5": round(min(99.9, test + 5), 2),
                **{key: round(value) for key, value in share.items()},
                **paper,
                "seconds": 2.31,
                "images_per_second": 21900.0,
            }
        )
    return rows


def _moment(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("epoch", "macs", "params", "channels", "paper_flops", "paper_params", "paper_channels")
    return {**{key: row[key] for key in keys if key in row}, "top1": row["test_top1"], "top5": row["test_top5"]}


def _variant(name: str, top1: float, totals: dict[str, Any], speed: float) -> dict[str, Any]:
    return {
        "name": name,
        "top1": top1,
        "top5": round(min(99.9, top1 + 5.8), 2),
        "params": totals["params"],
        "macs": totals["macs"],
        "file_bytes": totals["params"] * 4 + 11_000,
        "latency_ms": round(9.1 * speed, 3),
    }


if __name__ == "__main__":
    from softprune.lab.report import render_comparison, render_run

    out = Path(sys.argv[1])
    for network, epochs in (("vgg16", 160), ("resnet164", 160), ("digits_net", 12)):
        make(out / network, network, epochs=epochs)
        print(render_run(out / network))
    folders = []
    for level in (0.6, 1.0, 1.25):
        for seed in range(3):
            folders.append(out / f"vgg-{level}-{seed}")
            make(folders[-1], seed=seed, level=level)
    for seed in range(2):
        folders.append(out / f"vgg-slimming-{seed}")
        make(folders[-1], seed=seed, level=0.9, method="slimming")
    print(render_comparison(folders, out / "comparison.html"))
