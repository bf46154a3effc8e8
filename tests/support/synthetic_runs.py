"""Run folders as `softprune train` writes them, with made-up but plausible numbers, for the report's tests."""

import json
import math
import random
from pathlib import Path
from typing import Any

_VGG16 = [(width, 32 >> stage) for stage, width in enumerate((64, 128, 256, 512, 512)) for _ in range(2 + (stage > 1))]
_RESNET164 = [(width, 32 >> stage) for stage in range(3) for _ in range(18) for width in (64 << stage, 16 << stage, 16)]
_DIGITS = [(width, 8 >> stage) for stage, width in enumerate((16, 32, 64)) for _ in range(2)]
NETWORKS = {
    "vgg16": (_VGG16, 10, "cifar10", 93.85),
    "resnet164": (_RESNET164, 100, "cifar100", 76.9),
    "digits_net": (_DIGITS, 10, "digits", 98.9),
}
"""A chain of convolutions, (width, side of their images); classes, data and accuracy of the dense network."""


def make(
    folder: Path, network: str = "vgg16", *, seed: int = 0, epochs: int = 160, level: float = 1.0, method: str = "scp"
) -> dict[str, Any]:
    """Write one finished run and give its record; ``level`` scales how much is pruned (0: a dense run)."""
    layers, classes, data, top = NETWORKS[network]
    rng = random.Random(f"{network}-{seed}-{level}")
    widths = [width for width, _ in layers]
    shares = [
        1 - min(0.9, level * (0.15 + 0.6 * (at / len(layers)) ** 1.5 + rng.uniform(0, 0.06)))
        for at in range(len(layers))
    ]
    kept = [max(1, round(width * share)) if level else width for width, share in zip(widths, shares, strict=True)]
    modules = _modules(layers, kept, classes)
    dense, compact = (
        {key: sum(row[f"{key}_{which}"] for row in modules) for key in ("macs", "params")}
        for which in ("dense", "compact")
    )
    dense["channels"], compact["channels"] = sum(widths), sum(kept)
    rows = _curve(epochs, dense, compact, top - 0.1 - 0.5 * (level > 1), rng)
    speed = 0.15 + 0.85 * compact["macs"] / dense["macs"]
    variants = [("dense", top, dense, 1.0), ("masked", rows[-1]["test_top1"], dense, 1.02)]
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
            **{"python": "3.12.3", "numpy": "2.4.0", "cuda": "13.0", "cudnn": 91300, "processes": 1, "threads": 8},
            **{"torch": "2.11.0+cu130", "softprune": "0.1.0", "device": "NVIDIA H200"},
            **{"platform": "Linux-6.8-x86_64", "git": {"commit": "0123abc", "changed": False}},
        },
        "seed": seed,
        "started": "2025-01-04T10:02:11Z",
        "finished": "2025-01-04T10:09:02Z",
        "wall_seconds": 411.3,
        "images_per_second": 21900.0,
        "dense": dense,
        "compact": compact,
        "best": _moment(max(rows, key=lambda row: row["test_top1"])),
        "last": _moment(rows[-1]),
        "table": [_variant(*each) for each in (*variants, ("compact", rows[-1]["test_top1"], compact, speed))],
        "sites": [
            {"name": f"features.{at}.bn", "activation": "relu", "width": width, "kept": kept[at]}
            for at, width in enumerate(widths)
        ],
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


def _modules(layers: list[tuple[int, int]], kept: list[int], classes: int) -> list[dict[str, Any]]:
    rows, before, left = [], 3, 3
    for at, ((width, side), after) in enumerate(zip([*layers, (classes, 1)], [*kept, classes], strict=True)):
        linear = at == len(layers)
        dense, compact = (
            inputs * outputs * (1 if linear else 9) for inputs, outputs in ((before, width), (left, after))
        )
        name, kind = ("classifier", "Linear") if linear else (f"features.{at}.conv", "Conv2d")
        counts = {"macs_dense": dense * side**2, "macs_compact": compact * side**2}
        rows.append({"name": name, "kind": kind, **counts, "params_dense": dense, "params_compact": compact})
        before, left = width, after
    return rows


def _curve(epochs: int, dense: dict[str, Any], compact: dict[str, Any], top: float, rng: random.Random) -> list[Any]:
    rows = []
    for epoch in range(epochs):
        time = epoch / epochs
        stage = 0 if time < 0.5 else 1 if time < 0.756 else 2
        test = min(top, (top - (9.0, 0.9, 0.0)[stage]) * (1 - math.exp(-(epoch + 1.5) / (0.05 * epochs + 0.7))))
        test += rng.gauss(0, (1.6, 0.25, 0.07)[stage])
        progress = (1 - math.exp(-5.5 * time)) if epoch < epochs - 1 else 1.0
        rows.append(
            {
                "epoch": epoch,
                "step": (epoch + 1) * 782,
                "lr": (0.1, 0.01, 0.001)[stage],
                "strength": 1e-4,
                "train_loss": round(2.0 * math.exp(-3 * time) + 0.01, 4),
                "train_top1": round(min(99.98, test + 3 + 3.2 * time), 2),
                "test_loss": round(1.6 * math.exp(-2 * time) + 0.2, 4),
                "test_top1": round(min(test, 99.7), 2),
                "test_top5": round(min(99.9, test + 5), 2),
                **{key: round(dense[key] + (compact[key] - dense[key]) * progress) for key in dense},
                "seconds": 2.31,
                "images_per_second": 21900.0,
            }
        )
    return rows


def _moment(row: dict[str, Any]) -> dict[str, Any]:
    costs = {key: row[key] for key in ("epoch", "macs", "params", "channels")}
    return {**costs, "top1": row["test_top1"], "top5": row["test_top5"]}


def _variant(name: str, top1: float, totals: dict[str, Any], speed: float) -> dict[str, Any]:
    sizes = {"params": totals["params"], "macs": totals["macs"], "file_bytes": totals["params"] * 4 + 11_000}
    return {"name": name, "top1": top1, "top5": round(min(99.9, top1 + 5.8), 2), **sizes, "latency_ms": 9.1 * speed}
