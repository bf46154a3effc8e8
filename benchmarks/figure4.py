"""The paper's figure 4 from our records: test accuracy and pruning ratio against epochs, and the claim checked.

    python benchmarks/figure4.py

Reads every run of SCP with a fixed strength on CIFAR under results/, writes results/figure4.svg (CIFAR-10),
results/figure4-cifar100.svg and results/FIGURE4.md.
"""

from collections.abc import Callable
from pathlib import Path

from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Result

RESULTS = Path(__file__).parents[1] / "results"
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b8860b", "#2a9d8f", "#555555", "#e07a9a")
LEFT, TOP, WIDTH, HEIGHT, GAP = 60, 34, 640, 170, 44
FIGURES = {"cifar10": ("CIFAR-10", "figure4.svg", 50, 100), "cifar100": ("CIFAR-100", "figure4-cifar100.svg", 0, 80)}
"""Data sets: name, file of the figure, and the range of its axis of accuracy."""
NEAR = 1.0
"""Points of the final ratio within which sparsity counts as saturated."""


def runs(folder: Path = RESULTS) -> list[Result]:
    """The records of SCP with a fixed strength, by name."""
    records = [RunFolder(path.parent).read_result() for path in sorted(folder.glob("*/result.json"))]
    ours = [record for record in records if record.method == "scp" and record.data.startswith("cifar")]
    return [record for record in ours if not record.config.method.target]


def removed(run: Result) -> list[float]:
    """Percent of the channels removed after every epoch."""
    return [100 * (1 - row.channels / run.dense.channels) for row in run.epochs]


def accuracy(run: Result) -> list[float]:
    """Test top-1 after every epoch."""
    return [row.test_top1 for row in run.epochs]


def saturation(run: Result) -> int:
    """The epoch after which the share of removed channels stays within NEAR points of its final value."""
    values = removed(run)
    far = [number for number, value in enumerate(values, start=1) if abs(value - values[-1]) > NEAR]
    return far[-1] + 1 if far else 1


def page(found: list[Result]) -> str:
    """The page as Markdown."""
    lines = [
        "# Accuracy and pruning ratio against epochs",
        "",
        "The paper's figure 4, rendered from `results/*/result.json` by `python benchmarks/figure4.py`.",
        "",
        "The paper says that the ratio saturates at about half of the training. *Saturated*: the first epoch from",
        f"which the share of removed channels stays within {NEAR:g} point of its final value. *Half-way*: that share",
        "after half of the epochs. Runs to a budget are not here: they are finalised when they have met it.",
        "",
    ]
    for data, (title, file, _, _) in FIGURES.items():
        own = [run for run in found if run.data == data]
        picture = f"![{title}: test accuracy above, share of channels removed below, against epochs]({file})"
        lines += [f"## {title}", "", *([picture, "", *_table(own)] if own else ["No run yet."]), ""]
    return "\n".join(lines)


def _table(found: list[Result]) -> list[str]:
    lines = [
        "| run | seed | epochs | saturated at epoch | of the training | half-way | final | accuracy half-way | final |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in found:
        share, top1, epochs = removed(run), accuracy(run), len(run.epochs)
        half = epochs // 2 - 1
        lines.append(
            f"| {run.name} | {run.seed} | {epochs} | {saturation(run)} | {100 * saturation(run) / epochs:.0f}% | "
            f"{share[half]:.1f}% | {share[-1]:.1f}% | {top1[half]:.2f} | {top1[-1]:.2f} |"
        )
    return lines


def drawing(found: list[Result], low: int = 50, high: int = 100) -> str:
    """The figure as SVG; the axis of accuracy is from ``low`` to ``high`` percent."""
    bottom = TOP + 2 * HEIGHT + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 40 + 16 * len(found)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    epochs = max(len(run.epochs) for run in found)
    parts += _panel("test accuracy, %", TOP, low, high, epochs)
    parts += _panel("channels removed, %", TOP + HEIGHT + GAP, 0, 100, epochs)
    parts.append(f'<text x="{LEFT + WIDTH / 2:g}" y="{bottom + 32}" text-anchor="middle">epoch</text>')
    for number, run in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_line(accuracy(run), _scale(TOP, low, high), epochs, colour))
        parts.append(_line(removed(run), _scale(TOP + HEIGHT + GAP, 0, 100), epochs, colour))
        y = bottom + 48 + 16 * number
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="18" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y - 3}">{run.name}, seed {run.seed}</text>')
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


if __name__ == "__main__":
    everything = runs()
    (RESULTS / "FIGURE4.md").write_text(page(everything), encoding="utf-8")
    for data, (_, file, lowest, highest) in FIGURES.items():
        if own := [run for run in everything if run.data == data]:
            (RESULTS / file).write_text(drawing(own, lowest, highest), encoding="utf-8")
