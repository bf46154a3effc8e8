"""The paper's figure 4 from our records: test accuracy and pruning ratio against epochs, and the claim checked.

    python benchmarks/render.py    # writes results/figure4.svg, results/figure4-cifar100.svg and their table

Reads every run of SCP with a fixed strength on CIFAR under results/. Needs only the standard library.
"""

import json
from collections.abc import Callable
from typing import Any

import tables

Record = dict[str, Any]
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b8860b", "#2a9d8f", "#555555", "#e07a9a")
LEFT, TOP, WIDTH, HEIGHT, GAP = 60, 34, 640, 170, 44
FIGURES = {"cifar10": ("CIFAR-10", "figure4.svg", 50, 100), "cifar100": ("CIFAR-100", "figure4-cifar100.svg", 0, 80)}
"""Data sets: name, file of the figure, and the range of its axis of accuracy."""
NEAR = 1.0
"""Points of the final ratio within which sparsity counts as saturated."""


def runs() -> list[Record]:
    """Return the records of SCP with a fixed strength on CIFAR, by name."""
    found = [run for run in tables.runs() if run["method"] == "scp" and run["strength"] and run["data"] in FIGURES]
    files = [tables.RESULTS / run["folder"] / "result.json" for run in sorted(found, key=lambda run: run["folder"])]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def removed(run: Record) -> list[float]:
    """Return the percentage of the channels removed after every epoch."""
    return [100 * (1 - row["channels"] / run["dense"]["channels"]) for row in run["epochs"]]


def accuracy(run: Record) -> list[float]:
    """Return test top-1 after every epoch."""
    return [row["test_top1"] for row in run["epochs"]]


def saturation(run: Record) -> int:
    """Return the epoch after which the share of removed channels stays within NEAR points of its final value."""
    values = removed(run)
    far = [number for number, value in enumerate(values, start=1) if abs(value - values[-1]) > NEAR]
    return far[-1] + 1 if far else 1


def table(data: str) -> str:
    """Return when the share of removed channels saturates, for each run."""
    rows = []
    for run in runs():
        if run["data"] != data:
            continue
        share, top1, epochs = removed(run), accuracy(run), len(run["epochs"])
        half, end = epochs // 2 - 1, saturation(run)
        cells = [str(run["seed"]), str(end), f"{100 * end / epochs:.0f}%", f"{share[half]:.1f}%", f"{share[-1]:.1f}%"]
        rows.append([run["name"], *cells, f"{top1[half]:.2f}", f"{top1[-1]:.2f}"])
    head = ["run", "seed", "saturated at epoch", "of the training", "half-way", "final", "accuracy half-way", "final"]
    return tables.markdown(head, rows)


def drawing(found: list[Record], low: int = 50, high: int = 100) -> str:
    """Return the figure as SVG; the axis of accuracy is from ``low`` to ``high`` percent."""
    bottom = TOP + 2 * HEIGHT + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 40 + 16 * len(found)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    epochs = max(len(run["epochs"]) for run in found)
    parts += _panel("test accuracy, %", TOP, low, high, epochs)
    parts += _panel("channels removed, %", TOP + HEIGHT + GAP, 0, 100, epochs)
    parts.append(f'<text x="{LEFT + WIDTH / 2:g}" y="{bottom + 32}" text-anchor="middle">epoch</text>')
    for number, run in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_line(accuracy(run), _scale(TOP, low, high), epochs, colour))
        parts.append(_line(removed(run), _scale(TOP + HEIGHT + GAP, 0, 100), epochs, colour))
        y = bottom + 48 + 16 * number
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="18" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y - 3}">{run["name"]}, seed {run["seed"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(top: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: top + HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))


def _panel(title: str, top: float, low: int, high: int, epochs: int) -> list[str]:
    scale = _scale(top, low, high)
    parts = [f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{title}</text>']
    for value in range(low, high + 1, (high - low) // 5):
        y = f"{scale(value):.1f}"
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{value}</text>')
    for epoch in range(0, epochs + 1, 20):
        x = f"{LEFT + WIDTH * epoch / epochs:.1f}"
        parts.append(f'<text x="{x}" y="{top + HEIGHT + 16}" text-anchor="middle">{epoch}</text>')
    x = f"{LEFT + WIDTH / 2:g}"
    parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + HEIGHT}" stroke="#999999" stroke-dasharray="4 3"/>')
    return parts


def _line(values: list[float], scale: Callable[[float], float], epochs: int, colour: str) -> str:
    points = " ".join(
        f"{LEFT + WIDTH * number / epochs:.1f},{scale(value):.1f}" for number, value in enumerate(values, start=1)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def write() -> None:
    """Write the figures that have a run."""
    for data, (_, file, low, high) in FIGURES.items():
        if own := [run for run in runs() if run["data"] == data]:
            (tables.RESULTS / file).write_text(drawing(own, low, high), encoding="utf-8")
